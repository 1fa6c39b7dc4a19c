"""Write tests/backends/cuda_registers.json: what every kernel of every robot's control step needs on the GPU.

The test suite compares each kernel with this table, so that a change that costs registers or makes them spill is seen
where it is made. Run it after a change that is meant to; the difference is part of the change.

    python scripts/update_cuda_registers.py
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brax_concurrent.backends import cuda, nvvm
from brax_concurrent.envs.registry import list_envs, make_task
from brax_concurrent.envs.stream import StreamBuilder
from brax_concurrent.kernels.model import load_model
from brax_concurrent.kernels.specialize import Specialized, specialize

TABLE = Path(__file__).parents[1] / "tests" / "backends" / "cuda_registers.json"
TARGET = (9, 0)


@functools.cache
def specialized(robot: str, precision: str = "f32") -> Specialized:
    """The kernels of a robot's control step."""
    task = make_task(robot)
    stream = StreamBuilder(task, load_model(task.model, nconmax=task.nconmax)).control_step()
    return specialize(stream.kernels, stream.view, stream.fields, stream.user, precision)


@functools.cache
def compiled(robot: str, precision: str = "f32") -> dict[str, cuda.CudaKernel]:
    """The same, compiled for `TARGET`."""
    programs = [program for program in specialized(robot, precision).programs.values() if program.root.body]
    kernels = cuda.in_parallel(lambda program: cuda.compile_kernel(program, TARGET), programs)
    return {kernel.name: kernel for kernel in kernels}


def made_with(ptx: str) -> str:
    """The compilers whose numbers the table holds."""
    return f"sm_{TARGET[0]}{TARGET[1]}, NVVM {nvvm.compiler_of(ptx)}, {nvvm.toolchain()}"


def read() -> dict[str, Any]:
    """The table: `made_with`, and under `kernels` by robot and kernel the fields of nvvm.Resources."""
    return json.loads(TABLE.read_text())


def main() -> None:
    """Compile everything and write the table, one line a kernel."""
    robots, last = [], ""
    for robot in list_envs():
        kernels = compiled(robot)
        rows = [f'      "{name}": {json.dumps(asdict(kernel.resources))}' for name, kernel in kernels.items()]
        robots.append(f'    "{robot}": {{\n' + ",\n".join(rows) + "\n    }")
        last = next(iter(kernels.values())).ptx
        most = max(kernels.values(), key=lambda kernel: (kernel.resources.registers, kernel.resources.stack))
        print(f"{robot}: {len(kernels)} kernels, most: {most.name} {most.resources}")
    text = f'{{\n  "made_with": "{made_with(last)}",\n  "kernels": {{\n' + ",\n".join(robots) + "\n  }\n}\n"
    json.loads(text)
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
