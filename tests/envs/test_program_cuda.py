"""Streams as parts of a GPU's programs, without a GPU."""

from types import SimpleNamespace

from brax_concurrent.backends.cuda_link import DispatchPart
from brax_concurrent.backends.cuda_program import CudaPart
from brax_concurrent.envs import program_cuda
from brax_concurrent.scheduler.schedule import Schedule


def test_robots_under_hw_divide_the_multiprocessors_by_their_work(monkeypatch):
    made = []
    monkeypatch.setattr(program_cuda, "load_dispatch", lambda *_, **__: SimpleNamespace(large=False))
    monkeypatch.setattr(program_cuda, "compile_cuda", lambda parts, *_, **__: made.append([p.share for p in parts]))
    monkeypatch.setattr(program_cuda.cuda_driver, "multiprocessors", lambda: 132)
    monkeypatch.setattr(program_cuda.cuda_driver, "compute_capability", lambda: (9, 0))
    parts = [
        program_cuda.Functions(DispatchPart((), (), None, 0, 128), CudaPart((), 128, (), name=name)) for name in "ab"
    ]
    program_cuda.dispatch_parts(parts, Schedule("hw"), [3.0, 1.0])
    program_cuda.dispatch_parts(parts[:1], Schedule("hw"))
    assert made == [[99, 33], [0]]
