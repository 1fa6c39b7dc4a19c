"""AmoebaNet-A, the mobile one: N = 4 and F = 50.

Real et al. 2019, Regularized Evolution for Image Classifier Architecture Search, arXiv 1802.01548. Cells are those of
the authors' code, tensorflow/tpu, models/official/amoeba_net (model_specs.py, amoeba_net_a); cells.py says how they
are built.

What differs: that code halves even numbers of channels only, but with F = 50 the stem's second cell has 25, so here 12
and 13 make up its previous state. The counts agree with the published ones: of the multiply-adds counted here,
4.2 million are for columns of 1x7 convolutions that a stride of (1, 2) would leave out (cells.py), 0.8%.
"""

from __future__ import annotations

from brax_concurrent.networks.cells import Cell, cell_network
from brax_concurrent.networks.graph import Graph
from brax_concurrent.networks.published import Published

PUBLISHED = Published(
    parameters=5_100_000,
    multiply_adds=555_000_000,
    source="Real et al. 2019, AmoebaNet-A (N=4, F=50), 224x224; cells of the authors' code",
)

NORMAL = Cell(
    steps=(
        (("avg_pool_3x3", 0), ("max_pool_3x3", 0)),
        (("separable_3x3", 1), ("none", 1)),
        (("none", 0), ("avg_pool_3x3", 1)),
        (("separable_3x3", 0), ("separable_5x5", 2)),
        (("avg_pool_3x3", 5), ("separable_3x3", 0)),
    ),
    outputs=(1, 3, 4, 6),
)
REDUCTION = Cell(
    steps=(
        (("separable_3x3", 1), ("avg_pool_3x3", 0)),
        (("max_pool_3x3", 0), ("separable_7x7", 2)),
        (("max_pool_3x3", 1), ("max_pool_3x3", 0)),
        (("separable_3x3", 4), ("1x7_7x1", 0)),
        (("avg_pool_3x3", 1), ("separable_7x7", 0)),
    ),
    outputs=(2, 3, 4, 5, 6),
)


def amoebanet(
    *, image_size: int = 224, filters: int = 50, stem_filters: int = 32, repeats: int = 4, classes: int = 1000
) -> Graph:
    """AmoebaNet-A; the defaults are as published for mobile devices.

    Args, result and errors are `cells.cell_network`'s.
    """
    return cell_network(
        "amoebanet", NORMAL, REDUCTION,
        image_size=image_size, filters=filters, stem_filters=stem_filters, repeats=repeats, classes=classes,
    )  # fmt: skip
