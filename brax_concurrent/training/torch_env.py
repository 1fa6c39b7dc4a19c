"""A batch of environments for PyTorch, behind the interface of rsl_rl's VecEnv; needs the extra `torch`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

try:
    import torch
    from tensordict import TensorDict
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"TorchVecEnv needs PyTorch and tensordict: pip install 'brax-concurrent[torch]' ({error})", name=error.name
    ) from error

from brax_concurrent.envs import make
from brax_concurrent.envs.base import Env
from brax_concurrent.envs.own_task import AnyTask
from brax_concurrent.envs.state import State

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


class TorchVecEnv:
    """One robot's environments as rsl_rl's `VecEnv` has them, which Isaac Lab's and others' trainers take too.

    Tensors are DLPack views of JAX's arrays on the same device: nothing is copied on the way from or to PyTorch. Each
    step gives new ones, which are the caller's: later steps leave them alone, and they can be written to. Episodes that
    end are reset in the same step, each to a fresh random state. There are no derivatives.

    Observations are a TensorDict with the group "policy"; of rsl_rl's configuration that is
    `obs_groups={"actor": ["policy"], "critic": ["policy"]}`. The environments are reset when they are made.

    Attributes:
        num_envs, num_actions: environments, and entries of an action.
        max_episode_length: control steps until an episode is truncated.
        episode_length_buf: (num_envs,) int32 control steps since the episode's start. May be written to or assigned, to
            let episodes begin at different times.
        device: where the tensors are.
        cfg: what the environments were made from.
        env: the Env behind it.

    Args:
        env_or_name: one of `list_envs()` or a Task, from which `make` makes the environments; or an Env.
        num_envs: environments in the batch; None: an Env's own, else 1.
        seed: of the random numbers.
        make_arguments: further arguments of `make`, the task's among them; not with an Env.

    Raises:
        TypeError, ValueError: an argument is not what it should be; the message names it.
    """

    def __init__(
        self, env_or_name: str | AnyTask | Env, num_envs: int | None = None, *, seed: int = 0, **make_arguments: Any
    ):
        self.env = env = _env(env_or_name, num_envs, make_arguments)
        self.num_envs, self.num_actions = env.num_envs, env.action_size
        self.max_episode_length = env.task.max_episode_steps
        self.cfg = {"name": env.name, "num_envs": env.num_envs, "seed": seed, **make_arguments}
        self._reset = jax.jit(functools.partial(_reset, env))
        self._step = jax.jit(functools.partial(_step, env), donate_argnums=0)
        self._dtype = _DTYPES[env.dtype.name]
        self._obs: torch.Tensor
        self._key = jax.random.key(seed)
        self.reset()
        self.device = self._obs.device

    @property
    def unwrapped(self) -> TorchVecEnv:
        """Itself."""
        return self

    @property
    def state(self) -> State:
        """What `reset` or `step` left, the physics included, as JAX's arrays; gone with the next step."""
        return self._state

    def get_observations(self) -> TensorDict:
        """The current observations: {"policy": (num_envs, observation_size)}."""
        return TensorDict({"policy": self._obs}, batch_size=[self.num_envs])

    def reset(self, seed: int | None = None) -> tuple[TensorDict, dict[str, Any]]:
        """Fresh random states of all environments.

        Args:
            seed: of this reset and what follows; None: the random numbers go on from those before.

        Returns:
            The observations; extras, of which there are none.
        """
        if seed is not None:
            self._key = jax.random.key(seed)
        self._key, key = jax.random.split(self._key)
        self._state, results = self._reset(key)
        self._obs, self.episode_length_buf = self._tensors(results)
        return self.get_observations(), {}

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """One control step of all environments.

        Args:
            actions: (num_envs, num_actions), of the environments' dtype and on their device, without gradient.

        Returns:
            Observations {"policy": (num_envs, observation_size)}, where an episode ended the first of the next one;
            rewards (num_envs,); dones (num_envs,) int64, 1 where an episode ended; extras: "time_outs" (num_envs,)
            bool, where the time limit ended it; "final_obs" (num_envs, observation_size), the last observation before
            any reset; "log", the parts of the reward (num_envs,), by "/NAME".

        Raises:
            TypeError, ValueError: `actions` or `episode_length_buf` is of another type, shape, dtype or device.
        """
        shape = (self.num_envs, self.num_actions)
        given = self._checked("actions", actions, shape, self._dtype)
        elapsed = self._checked("episode_length_buf", self.episode_length_buf, shape[:1], torch.int32)
        self._state, results = self._step(self._state, as_jax(elapsed), as_jax(given))
        self._obs, self.episode_length_buf, rewards, dones, *others, metrics = self._tensors(results)
        extras = dict(zip(("time_outs", "final_obs"), others, strict=True))
        extras["log"] = {"/" + name: value for name, value in metrics.items()}
        return self.get_observations(), rewards, dones.long(), extras

    def close(self) -> None:
        """Nothing has to be closed."""

    def _tensors(self, arrays: Any) -> Any:
        if self.env.backend == "cpu":  # JAX reads the actions while it computes: the caller may write to them then
            jax.block_until_ready(arrays)
        return jax.tree.map(as_torch, arrays)

    def _checked(self, name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
        if dtype is torch.int32 and not value.is_floating_point():
            value = value.to(dtype)  # torch's default of whole numbers is int64
        if value.requires_grad:
            raise ValueError(f"{name}: a step has no derivatives, got a tensor that requires grad: use {name}.detach()")
        if value.shape != shape or value.dtype != dtype or value.device != self._obs.device:
            expected = f"{dtype} {shape} on {self._obs.device}"
            raise ValueError(f"{name}: expected {expected}, got {value.dtype} {tuple(value.shape)} on {value.device}")
        return value


def as_torch(array: jax.Array) -> torch.Tensor:
    """A JAX array as a tensor of the same memory. JAX takes it for constant: write to a clone."""
    with torch.inference_mode(False):  # else it could be neither written to nor differentiated with later
        return torch.from_dlpack(array)


def as_jax(tensor: torch.Tensor) -> jax.Array:
    """A tensor as a JAX array of the same memory, or of a copy where it is not contiguous or not aligned.

    Do not write to the tensor before what JAX computes from it is done. It must not require grad.
    """
    return jax.dlpack.from_dlpack(tensor.contiguous())


# ---- What is jitted


def _reset(env: Env, key: jax.Array) -> tuple[State, tuple[jax.Array, ...]]:
    state = env.reset(key)
    return state, (state.obs, state.internal["elapsed"])


def _step(env: Env, state: State, elapsed: jax.Array, actions: jax.Array) -> tuple[State, tuple[Any, ...]]:
    """The state to go on from, which the next step overwrites, and what the caller gets, which it does not."""
    new = env.step(state.replace(internal=state.internal | {"elapsed": elapsed}), actions)
    time_outs = new.truncated & ~new.terminated
    told = (new.obs, new.internal["elapsed"], new.reward, new.done, time_outs, new.final_obs, dict(new.metrics))
    return new, jax.tree.map(jnp.copy, told)


def _env(source: str | AnyTask | Env, num_envs: int | None, arguments: dict[str, Any]) -> Env:
    """The environments that `TorchVecEnv` was asked for."""
    if isinstance(source, Env):
        if arguments or num_envs not in (None, source.num_envs):
            given = [*([] if num_envs in (None, source.num_envs) else [f"num_envs={num_envs}"]), *arguments]
            raise TypeError(f"env_or_name: an Env has its arguments already, got {given} beside it")
        if not source.autoreset:
            raise ValueError("env_or_name: expected an Env made with autoreset=True")
        return source
    if not isinstance(source, (str, AnyTask)):
        raise TypeError(f"env_or_name: expected the name of a robot, a Task or an Env, got {type(source).__name__}")
    if "autoreset" in arguments:
        raise TypeError("autoreset: the step resets what ended")
    return make(source, 1 if num_envs is None else num_envs, **arguments)
