"""NASNet-A, the mobile one: NASNet-A (4 @ 1056).

Zoph et al. 2018, Learning Transferable Architectures for Scalable Image Recognition, arXiv 1707.07012. Cells and sizes
are those of the authors' code, tensorflow/models, research/slim/nets/nasnet (build_nasnet_mobile); cells.py says how
they are built. 1056 is what the last cell concatenates: 6 states of 176 channels.
"""

from __future__ import annotations

from brax_concurrent.networks.cells import Cell, cell_network
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.published import Published

PUBLISHED = Published(
    parameters=5_300_000,
    multiply_adds=564_000_000,
    source="Zoph et al. 2018, table 3, NASNet-A (4 @ 1056), 224x224; cells and sizes of the authors' code",
)

NORMAL = Cell(
    steps=(
        (("separable_5x5", 0), ("separable_3x3", 1)),
        (("separable_5x5", 1), ("separable_3x3", 1)),
        (("avg_pool_3x3", 0), ("none", 1)),
        (("avg_pool_3x3", 1), ("avg_pool_3x3", 1)),
        (("separable_3x3", 0), ("none", 0)),
    ),
    outputs=(1, 2, 3, 4, 5, 6),
)
REDUCTION = Cell(
    steps=(
        (("separable_5x5", 0), ("separable_7x7", 1)),
        (("max_pool_3x3", 0), ("separable_7x7", 1)),
        (("avg_pool_3x3", 0), ("separable_5x5", 1)),
        (("none", 3), ("avg_pool_3x3", 2)),
        (("separable_3x3", 2), ("max_pool_3x3", 0)),
    ),
    outputs=(3, 4, 5, 6),
)


def nasnet(
    *, image_size: int = 224, filters: int = 44, stem_filters: int = 32, repeats: int = 4, classes: int = 1000
) -> Graph:
    """NASNet-A; the defaults are as published for mobile devices.

    Args, result and errors are `cells.cell_network`'s.
    """
    return cell_network(
        "nasnet", NORMAL, REDUCTION,
        image_size=image_size, filters=filters, stem_filters=stem_filters, repeats=repeats, classes=classes,
    )  # fmt: skip
