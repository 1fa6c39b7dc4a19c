"""A robot's motion as a film, or as a web page that needs nothing else; films need the extra `render`."""

from __future__ import annotations

import base64
import contextlib
import copy
import html
import importlib
import json
import os
import string
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from brax_concurrent.envs.own_task import AnyTask
from brax_concurrent.envs.registry import make_task
from brax_concurrent.kernels.model import compile_mjcf

FORMATS = (".mp4", ".gif", ".html")
_MOST_FPS = 50.0  # what GIF can have, and more than the eye needs
_TEMPLATE = Path(__file__).with_name("render.html")


def render(
    robot: str | os.PathLike[str] | mujoco.MjModel | AnyTask,
    qpos: Any,
    path: str | os.PathLike[str],
    *,
    mocap_pos: Any = None,
    dt: float | None = None,
    width: int = 640,
    height: int = 480,
    camera: str | int | None = None,
) -> Path:
    """Write the motion of one robot to a file, in real time, at up to 50 pictures a second.

    Films (.mp4, .gif) are drawn by MuJoCo with OpenGL: by the library that MUJOCO_GL names, else GLFW where there is a
    display, else EGL, else OSMesa. A page (.html) needs no OpenGL: its script draws capsules and spheres, and boxes
    around other shapes; it follows the robot, which is all that actuators move, and can be turned with the mouse.

    Args:
        robot: the name of a robot, a Task, the path or text of an MJCF file, or a compiled model.
        qpos: (T, nq) positions, one row for each `dt`.
        path: where to write; its ending is the format. A file that is there is replaced.
        mocap_pos: (T, nmocap, 3) positions of the mocap bodies, m; None: the model's.
        dt: seconds between rows; None: the task's control step, of a model its timestep.
        width, height: of a film, pixels, even.
        camera: name or number of one of the model's cameras. A film is seen through it; None: through the first, or if
            there is none through a free one. A page begins with its view; None: from the side, a little above.

    Returns:
        The path.

    Raises:
        TypeError, ValueError, FileNotFoundError: an argument is not what it should be; the message names it.
        ImportError: a film needs the extra `render`.
        RuntimeError: a film needs OpenGL, of which there is none; the message says what was tried.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"path: expected a name that ends in one of {FORMATS}, got {str(path)!r}")
    mj, step = _model(robot)
    poses = _Poses(mj, qpos, mocap_pos)
    chosen, fps = _chosen_rows(len(poses.qpos), step if dt is None else dt)
    number = _checked_camera(mj, camera)
    with _whole_file(path) as temporary:
        if path.suffix.lower() == ".html":
            temporary.write_text(_page(poses, chosen, 1 / fps, path.stem, number))
        else:
            _film(poses, chosen, fps, temporary, _checked_size(width, height), _view(mj, number))
    return path


class _Poses:
    """A model's data at each row of a trajectory."""

    def __init__(self, mj: mujoco.MjModel, qpos: Any, mocap_pos: Any):
        self.mj, self.data = mj, mujoco.MjData(mj)
        self.qpos = np.asarray(qpos, float)
        if self.qpos.ndim != 2 or self.qpos.shape[1] != mj.nq or not len(self.qpos):
            raise ValueError(f"qpos: expected (T, {mj.nq}) positions, T at least 1, got {self.qpos.shape}")
        own = np.broadcast_to(self.data.mocap_pos, (len(self.qpos), mj.nmocap, 3))
        self.mocap_pos = own if mocap_pos is None else np.asarray(mocap_pos, float)
        if self.mocap_pos.shape != own.shape:
            raise ValueError(f"mocap_pos: expected {own.shape}, got {self.mocap_pos.shape}")
        for name, value in (("qpos", self.qpos), ("mocap_pos", self.mocap_pos)):
            if not np.isfinite(value).all():
                raise ValueError(
                    f"{name}: expected finite numbers, got others in row {np.argwhere(~np.isfinite(value))[0][0]}"
                )

    def at(self, rows: Sequence[int]) -> Iterator[mujoco.MjData]:
        """The data with everything that follows from the positions, row by row."""
        for row in rows:
            self.data.qpos[:], self.data.mocap_pos[:] = self.qpos[row], self.mocap_pos[row]
            mujoco.mj_kinematics(self.mj, self.data)
            mujoco.mj_comPos(self.mj, self.data)
            mujoco.mj_camlight(self.mj, self.data)
            yield self.data


def _model(robot: Any) -> tuple[mujoco.MjModel, float]:
    """A model that may be changed, and the seconds between rows."""
    if (
        isinstance(robot, str)
        and not robot.lstrip().startswith("<")
        and os.sep not in robot
        and not robot.endswith(".xml")
    ):
        robot = make_task(robot)
    frame_skip = 1
    if isinstance(robot, AnyTask):
        robot, frame_skip = robot.model, robot.frame_skip
    mj = copy.copy(compile_mjcf(robot)[0])
    return mj, mj.opt.timestep * frame_skip


def _chosen_rows(rows: int, dt: float) -> tuple[list[int], float]:
    """Which rows to show, and how many a second."""
    if not 0 < dt < np.inf:
        raise ValueError(f"dt: expected a positive number of seconds, got {dt!r}")
    fps = min(1 / dt, _MOST_FPS)
    return np.round(np.arange(0, rows - 0.5, 1 / (fps * dt))).astype(int).tolist(), fps


def _checked_size(width: int, height: int) -> tuple[int, int]:
    for name, value in (("width", width), ("height", height)):
        if not isinstance(value, int) or value < 2 or value % 2:
            raise ValueError(f"{name}: expected an even number of pixels of at least 2, got {value!r}")
    return width, height


def _checked_camera(mj: mujoco.MjModel, camera: str | int | None) -> int | None:
    """Its number."""
    names = [mj.camera(i).name for i in range(mj.ncam)]
    if isinstance(camera, str) and camera in names:
        return names.index(camera)
    if camera is None or (isinstance(camera, int) and 0 <= camera < mj.ncam):
        return camera
    raise ValueError(f"camera: expected one of {names} or a number below {mj.ncam}, got {camera!r}")


def _view(mj: mujoco.MjModel, camera: int | None) -> mujoco.MjvCamera:
    view = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(mj, view)
    if camera is not None or mj.ncam:
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera or 0
    return view


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, which takes its place at the end if nothing went wrong."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix.lower(), dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


# ---- Films


def _film(
    poses: _Poses, rows: Sequence[int], fps: float, path: Path, size: tuple[int, int], camera: mujoco.MjvCamera
) -> None:
    try:
        from imageio import v3 as imageio

        importlib.import_module("imageio.plugins.pyav")  # encodes in this process: JAX's threads forbid a fork
    except ImportError as error:
        raise ImportError('films need the extra `render`: pip install "brax-concurrent[render]"') from error
    with contextlib.closing(_Painter(poses.mj, *size)) as painter:
        pictures = (painter.picture(data, camera) for data in poses.at(rows))
        if path.suffix == ".gif":
            imageio.imwrite(path, list(pictures), plugin="pillow", duration=1000 / fps, loop=0)
            return
        with imageio.imopen(path, "w", plugin="pyav") as film:
            film.init_video_stream("libx264", fps=fps)
            for picture in pictures:
                film.write_frame(picture)


class _Painter:
    """Draws a model into memory. mujoco.Renderer would do, but for the choice of the library, made on import."""

    def __init__(self, mj: mujoco.MjModel, width: int, height: int):
        mj.vis.global_.offwidth, mj.vis.global_.offheight = width, height
        self._mj, self._size = mj, (width, height)
        self._option, self._scene = mujoco.MjvOption(), mujoco.MjvScene(mj, maxgeom=10_000)
        self._opengl, self._context = _opengl(mj, width, height)

    def picture(self, data: mujoco.MjData, camera: mujoco.MjvCamera) -> np.ndarray:
        """(height, width, 3) uint8."""
        width, height = self._size
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._mj, data, self._option, None, camera, everything, self._scene)
        view, pixels = mujoco.MjrRect(0, 0, width, height), np.empty((height, width, 3), np.uint8)
        mujoco.mjr_render(view, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, view, self._context)
        return pixels[::-1]

    def close(self) -> None:
        """Let go of OpenGL."""
        self._context.free()
        self._opengl.free()


def _opengl(mj: mujoco.MjModel, width: int, height: int) -> tuple[Any, mujoco.MjrContext]:
    """An OpenGL context without a window and MuJoCo's own, by the first library that works."""
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    libraries = [wanted] if wanted else [*(["glfw"] if os.environ.get("DISPLAY") else []), "egl", "osmesa"]
    failures = []
    for library in libraries:
        try:
            context = importlib.import_module(f"mujoco.{library}").GLContext(width, height)
            context.make_current()
            own = mujoco.MjrContext(mj, mujoco.mjtFontScale.mjFONTSCALE_100.value)
            mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, own)
            return context, own
        except Exception as error:  # each library has errors of its own
            failures.append(f"{library}: {type(error).__name__}: {error}")
    raise RuntimeError(
        f"a film needs OpenGL, and none works here ({'; '.join(failures)}). On Debian `apt-get install libegl1` brings "
        "EGL. A path that ends in .html needs none"
    )


# ---- Pages


_SIDE, _ABOVE = -1.2, 0.25  # azimuth and elevation, rad, that a page begins with
_STEADY = 0.5  # s over which a page's view takes the mean of the robot's height: else the ground would bob


def _page(poses: _Poses, rows: Sequence[int], dt: float, title: str, camera: int | None) -> str:
    mj = poses.mj
    shown = [g for g in range(mj.ngeom) if mj.geom_type[g] != mujoco.mjtGeom.mjGEOM_PLANE and _rgba(mj, g)[3] > 0]
    planes = [g for g in range(mj.ngeom) if mj.geom_type[g] == mujoco.mjtGeom.mjGEOM_PLANE and not mj.geom_bodyid[g]]
    where, bases, middles = np.empty((len(rows), len(shown), 7), "<f4"), np.empty((len(rows), 3)), []
    trees, sight = _robot(mj), (_SIDE, _ABOVE, 0.0)
    masses = mj.body_subtreemass[trees] + 1e-9
    followed = [place for place, g in enumerate(shown) if mj.body_rootid[mj.geom_bodyid[g]] in trees]
    for frame, data in enumerate(poses.at(rows)):
        for place, g in enumerate(shown):
            where[frame, place, :3] = data.geom_xpos[g]
            quaternion = np.empty(4)
            mujoco.mju_mat2Quat(quaternion, data.geom_xmat[g])
            where[frame, place, 3:] = quaternion
        bases[frame] = np.average(data.xpos[trees], axis=0, weights=masses)
        middles.append(np.average(data.subtree_com[trees], axis=0, weights=masses))
        if frame == 0 and camera is not None:
            sight = _sight(data, camera, middles[0])
    targets = bases + np.mean(middles - bases, axis=0)  # so that a pendulum swings, and not the ground below it
    reach = np.linalg.norm(where[:, followed, :3] - targets[:, None], axis=2) + mj.geom_rbound[shown][followed]
    size = float(np.quantile(reach.max(axis=1), 0.9)) if followed else 0.5  # in all frames but the wildest
    targets[:, 2] = _steadied(targets[:, 2], max(1, round(_STEADY / dt)))
    scene = {
        "dt": dt,
        "frames": len(rows),
        "size": size,
        "azimuth": sight[0],
        "elevation": sight[1],
        "distance": sight[2] or 3.0 * size,
        "ground": float(mj.geom_pos[planes[0], 2]) if planes else None,
        "geoms": [_shape(mj, g) for g in shown],
        "targets": np.round(targets, 4).tolist(),
        "poses": base64.b64encode(where.tobytes()).decode(),
    }
    # "<" could begin a tag, also inside a script.
    told = json.dumps(scene).replace("<", "\\u003c")
    return string.Template(_TEMPLATE.read_text()).substitute(title=html.escape(title), scene=told)


def _robot(mj: mujoco.MjModel) -> list[int]:
    """The roots of the trees of bodies that actuators move; if there are none of all that move, else of all."""
    joint = (mujoco.mjtTrn.mjTRN_JOINT.value, mujoco.mjtTrn.mjTRN_JOINTINPARENT.value)
    transmissions = zip(mj.actuator_trntype, mj.actuator_trnid[:, 0], strict=True)
    actuated = {int(mj.jnt_bodyid[i]) for kind, i in transmissions if kind in joint}
    moving = {int(body) for body in mj.jnt_bodyid}
    bodies = actuated or moving or set(range(1, mj.nbody)) or {0}
    return sorted({int(mj.body_rootid[body]) for body in bodies})


def _sight(data: mujoco.MjData, camera: int, target: np.ndarray) -> tuple[float, float, float]:
    """A camera's azimuth and elevation, rad, and how far in front of it the target is, m."""
    back = data.cam_xmat[camera].reshape(3, 3)[:, 2]
    distance = max(float((data.cam_xpos[camera] - target) @ back), 0.1)
    return float(np.arctan2(back[1], back[0])), float(np.arcsin(np.clip(back[2], -1, 1))), distance


def _steadied(heights: np.ndarray, frames: int) -> np.ndarray:
    """Moving averages over so many frames; over fewer at the ends."""
    ones = np.ones(min(frames, len(heights)))
    return np.convolve(heights, ones, "same") / np.convolve(np.ones_like(heights), ones, "same")


def _rgba(mj: mujoco.MjModel, geom: int) -> np.ndarray:
    material = mj.geom_matid[geom]
    return mj.geom_rgba[geom] if material < 0 else mj.mat_rgba[material]


def _shape(mj: mujoco.MjModel, geom: int) -> dict[str, Any]:
    """What the page's script draws: a capsule, a sphere being one of length 0, or the box around another shape."""
    size, rgb = mj.geom_size[geom].tolist(), np.round(_rgba(mj, geom)[:3], 3).tolist()
    if mj.geom_type[geom] == mujoco.mjtGeom.mjGEOM_SPHERE:
        return {"rgb": rgb, "radius": size[0], "length": 0.0}
    if mj.geom_type[geom] == mujoco.mjtGeom.mjGEOM_CAPSULE:
        return {"rgb": rgb, "radius": size[0], "length": size[1]}
    box = mj.geom_aabb[geom].tolist()
    return {"rgb": rgb, "centre": box[:3], "half": box[3:]}
