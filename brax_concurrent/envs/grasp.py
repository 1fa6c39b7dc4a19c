"""Grasp: a hand of four fingers picks up a ball and carries it to targets. After Brax v1's "grasp"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from brax_concurrent.envs.task import KernelTask, Memory, Outcome, body_id, check_arguments, check_at_least
from brax_concurrent.kernels.model import Model
from brax_concurrent.kernels.ops import clip, either, maximum, sincos, to_float, where
from brax_concurrent.kernels.vec import Vec, add, add_scaled, cross, dot, norm, scale, sub

_FINGERS = (1, 2, 3, 4)
_LINKS = tuple(f"{link}_{finger}" for finger in _FINGERS for link in ("proximal", "middle", "distal"))
_PALM_LOW, _PALM_HIGH = (-10.0, -10.0, 3.5), (10.0, 10.0, 13.5)
_PALM_RATE = 0.15  # of the way to its goal that the palm goes in a control step,
_PALM_REACH = 2.0  # of at most so many metres of the way
_FIRST_TARGET = (0.0, 0.0, 1.1)
_FREE = 0
_PI = 3.141592653589793


@dataclass(kw_only=True, eq=False)
class Grasp(KernelTask):
    """Pick up a ball of 2 m and carry it to a target; when it gets there, the target moves elsewhere.

    All axes are the world's: the palm does not turn, so "from the palm" is relative to its position. Bodies
    are where their centres of mass are. Links are proximal_1, middle_1, distal_1, proximal_2, ..., distal_4.

    Observation, 105 numbers:

    | Index   | Meaning                                                          | Unit   |
    | ------- | ---------------------------------------------------------------- | ------ |
    | 0-3     | ball, from the palm: distance, direction                         | m, 1   |
    | 4-7     | target, from the palm: distance, direction                       | m, 1   |
    | 8-10    | palm                                                             | m      |
    | 11-13   | ball, from the palm                                              | m      |
    | 14-49   | the 12 links, from the palm                                      | m      |
    | 50-52   | target, from the palm                                            | m      |
    | 53-55   | velocity of the ball                                             | m/s    |
    | 56-91   | velocities of the 12 links relative to the palm                  | m/s    |
    | 92-94   | velocity of the palm                                             | m/s    |
    | 95      | velocity of the palm toward the ball                             | m/s    |
    | 96-99   | target, from the ball: distance, direction                       | m, 1   |
    | 100     | velocity of the ball toward the target                           | m/s    |
    | 101-104 | whether distal_1, distal_2, distal_3, distal_4 touches the ball  | 0 or 1 |

    Action, 19 numbers in [-1, 1], which mean the ends of these ranges:

    | Index        | Meaning                                        | Range                                 |
    | ------------ | ---------------------------------------------- | ------------------------------------- |
    | 0, 4, 8, 12  | angle to which finger 1, 2, 3, 4 curls         | -45 to 45 degrees                     |
    | 1, 5, 9, 13  | angle to which it twists about its long axis   | -45 to 45 degrees                     |
    | 2, 6, 10, 14 | angle of its middle joint                      | 0 to 90 degrees; finger 1: -90 to 0   |
    | 3, 7, 11, 15 | angle of its distal joint                      | 0 to 90 degrees; finger 1: -90 to 0   |
    | 16-18        | where the palm goes                            | x, y: -10 to 10 m; z: 3.5 to 13.5 m   |

    Before the physics of a control step the palm goes 0.15 of its way, but at most 0.3 m.

    Reward = the sum of the metrics, where dt = 0.02 s:

    | Metric                | Value                                                                          |
    | --------------------- | ------------------------------------------------------------------------------ |
    | reward_hit            | hit_reward if the ball is within target_radius of the target                   |
    | reward_ball_to_target | ball_to_target_weight * dt * velocity of the ball toward the target            |
    | reward_palm_to_ball   | palm_to_ball_weight * dt * velocity of the palm toward the ball                |
    | reward_close          | close_weight * dt / (1 + horizontal distance of palm and ball)                 |
    | reward_touch          | touch_weight * dt * number of distal links that touch the ball                 |

    Info: hit (0 or 1), touches (0 to 4), ball_height (m), target_distance (of the ball, m).

    Termination: never. After a hit the target moves to a random place: at the height U(0, target_height), and
    at the horizontal distance target_radius + U(0, target_distance) from the origin in any direction.

    Reset: qpos0, with U(-s, s) added to the ball's x and y (m) and to the finger joints (rad), where
    s = reset_noise_scale; no velocity; the palm where the model has it, over the ball; a target as after a
    hit.

    Positions, velocities and contacts are MuJoCo's derived data: those of the physics' last evaluation, one
    physics step (5 ms) before the end of the control step.

    What differs from Brax v1:

    - The physics is MuJoCo's: soft contacts with friction cones, not position-based dynamics. See
      assets/grasp.xml for the bodies.
    - 19 actions, not 39: v1 also takes angles for the 20 locked axes. The palm's are clipped to [-1, 1].
    - 105 observations, not 132, in v1's order: what is always 0 or told twice is left out, and so are the
      contact flags of all but the distal links. Velocities of links are relative to the palm.
    - The palm's velocity is its displacement in the control step by dt. V1's palm moves without having a
      velocity; that of finger 1's proximal link stands in for it.
    - Touching is having a contact. In v1 it is having a contact that moves (at over 3 mm/s), so a firm grip
      may not count.
    - Reset has noise and a random target. V1 always starts with the target on the ball, so every episode
      begins with a hit: this is `reset_noise_scale=0, random_target_at_reset=False`.
    - The metrics are parts of the reward. V1's are called hits (without the factor 5), movingObjectToTarget,
      movingToObject, closeToObject and touchingObject.
    - After a hit the observation shows the new target at once, in v1 one step later.

    Args:
        xml_file: "grasp.xml", the path of an MJCF file, MJCF text or a mujoco.MjModel. It must have bodies
            and geoms of the names above, the ball being "object".
        frame_skip: physics steps per control step.
        hit_reward, ball_to_target_weight, palm_to_ball_weight, close_weight, touch_weight: see the reward.
        target_radius, target_distance, target_height: see the reward and the termination; m.
        reset_noise_scale: see the reset.
        random_target_at_reset: whether the first target is random, or v1's (0, 0, 1.1).

    Raises:
        TypeError, ValueError, FileNotFoundError: an argument is not what it should be; the message names it.

    Source: Freeman et al., "Brax - A Differentiable Physics Engine for Large Scale Rigid Body Simulation"
    (2021), and brax/v1/envs/grasp.py of Brax 0.10.5.
    """

    xml_file: Any = "grasp.xml"
    frame_skip: int = 4
    hit_reward: float = 5.0
    ball_to_target_weight: float = 1.5
    palm_to_ball_weight: float = 0.1
    close_weight: float = 0.1
    touch_weight: float = 0.2
    target_radius: float = 1.1
    target_distance: float = 10.0
    target_height: float = 8.0
    reset_noise_scale: float = 0.05
    random_target_at_reset: bool = True

    name = "grasp"
    metrics = ("reward_hit", "reward_ball_to_target", "reward_palm_to_ball", "reward_close", "reward_touch")
    info = ("hit", "touches", "ball_height", "target_distance")

    def __post_init__(self) -> None:
        check_arguments(self)
        check_at_least(self, 0.0, "target_radius", "target_distance", "target_height", "reset_noise_scale")
        model = self._adopt_model(self.xml_file, "grasp.xml")
        self._find_parts(model)
        self._servos = model.nu
        self.action_size = self._servos + 3
        self.action_high = np.ones(self.action_size, np.float32)
        self.action_low = -self.action_high
        self.memory = {"target": 3, "palm": 3, "palm_velocity": 3, "touch": len(_FINGERS)}
        links = 3 * len(_LINKS)
        self._observe(
            palm_to_ball=4,
            palm_to_target=4,
            palm=3,
            ball=3,
            links=links,
            target=3,
            ball_velocity=3,
            link_velocities=links,
            palm_velocity=3,
            palm_velocity_to_ball=1,
            ball_to_target=4,
            ball_velocity_to_target=1,
            touch=len(_FINGERS),
        )

    def _find_parts(self, model: Model) -> None:
        """Ids of what the task names; a missing one is named."""
        self._ball, self._palm = (body_id(model, "xml_file", name) for name in ("object", "palm"))
        self._links = [body_id(model, "xml_file", name) for name in _LINKS]
        self._mocap = int(model.body_mocapid[self._palm])
        if self._mocap < 0:
            raise ValueError("xml_file: expected 'palm' to be a mocap body")
        if model.body_jntnum[self._ball] != 1 or model.jnt_type[model.body_jntadr[self._ball]] != _FREE:
            raise ValueError("xml_file: expected 'object' to have a free joint")
        pairs = [{model.geom_names[g] for g in pair} for pair in model.pair_geom]
        tips = [{"object", f"distal_{finger}"} for finger in _FINGERS]
        missing = [sorted(tip) for tip in tips if tip not in pairs]
        if missing:
            raise ValueError(f"xml_file: expected geoms that can touch: {' and '.join(missing[0])}")
        self._tip_pairs = [pairs.index(tip) for tip in tips]

    def control(self, m: Any, w: Any, action: list[Any], memory: Memory) -> None:
        for i in range(self._servos):
            w.ctrl[i] = _between(m.actuator_ctrlrange[i, 0], m.actuator_ctrlrange[i, 1], action[i])
        palm = memory["palm"]
        wanted = [clip(a, -1.0, 1.0) for a in action[self._servos :]]
        way = sub([_between(*ends) for ends in zip(_PALM_LOW, _PALM_HIGH, wanted, strict=True)], palm)
        share = _PALM_RATE * _PALM_REACH / maximum(norm(way), _PALM_REACH)
        w.mocap_pos[self._mocap] = add_scaled(palm, way, share)

    def observation(self, m: Any, w: Any, memory: Memory) -> list[Any]:
        target, palm, palm_velocity = memory["target"], memory["palm"], memory["palm_velocity"]
        ball, ball_velocity = w.xipos[self._ball], _velocity(m, w, self._ball)
        to_ball, to_target, ball_to_target = sub(ball, palm), sub(target, palm), sub(target, ball)
        distance, direction = _polar(to_ball)
        target_distance, target_direction = _polar(to_target)
        ball_distance, ball_direction = _polar(ball_to_target)
        return [
            *(distance, *direction, target_distance, *target_direction),
            *palm,
            *to_ball,
            *(x for b in self._links for x in sub(w.xipos[b], palm)),
            *to_target,
            *ball_velocity,
            *(x for b in self._links for x in _velocity(m, w, b)),
            *palm_velocity,
            dot(palm_velocity, direction),
            *(ball_distance, *ball_direction),
            dot(ball_velocity, ball_direction),
            *memory["touch"],
        ]

    def outcome(self, m: Any, w: Any, action: list[Any], before: Memory, after: Memory) -> Outcome:
        dt = self.frame_skip * m.opt.timestep
        ball, palm = w.xipos[self._ball], after["palm"]
        to_ball = sub(ball, palm)
        target_distance, target_direction = _polar(sub(before["target"], ball))
        hit = target_distance < self.target_radius
        touches = sum(after["touch"])
        to_target_speed = dot(_velocity(m, w, self._ball), target_direction)
        to_ball_speed = dot(after["palm_velocity"], _polar(to_ball)[1])
        parts = {
            "reward_hit": where(hit, self.hit_reward, 0.0),
            "reward_ball_to_target": self.ball_to_target_weight * dt * to_target_speed,
            "reward_palm_to_ball": self.palm_to_ball_weight * dt * to_ball_speed,
            "reward_close": self.close_weight * dt / (1.0 + norm(to_ball[:2])),
            "reward_touch": self.touch_weight * dt * touches,
        }
        return Outcome(
            reward=sum(parts.values()),
            terminated=False,
            metrics=parts,
            info={
                "hit": to_float(hit),
                "touches": touches,
                "ball_height": ball[2],
                "target_distance": target_distance,
            },
        )

    def remember(self, m: Any, w: Any, before: Memory, random: Any) -> dict[str, list[Any]]:
        palm = w.mocap_pos[self._mocap]
        hit = norm(sub(before["target"], w.xipos[self._ball])) < self.target_radius
        moved = zip(self._random_target(random), before["target"], strict=True)
        return {
            "target": [where(hit, new, old) for new, old in moved],
            "palm": palm,
            "palm_velocity": scale(sub(palm, before["palm"]), 1.0 / (self.frame_skip * m.opt.timestep)),
            "touch": self._touch(w),
        }

    def reset(self, m: Any, w: Any, random: Any) -> None:
        noise = self.reset_noise_scale
        w.mocap_pos[self._mocap] = [m.body_pos[self._palm, i] for i in range(3)]
        for j in range(m.njnt):
            first, free = m.jnt_qposadr[j], m.jnt_type[j] == _FREE
            for i in range(7 if free else 1):
                shift = random.uniform(-noise, noise) if i < 2 else 0.0
                w.qpos[first + i] = m.qpos0[first + i] + shift
        for i in range(m.nv):
            w.qvel[i] = 0.0

    def remember_reset(self, m: Any, w: Any, random: Any) -> dict[str, list[Any]]:
        return {
            "target": self._random_target(random) if self.random_target_at_reset else list(_FIRST_TARGET),
            "palm": w.mocap_pos[self._mocap],
            "palm_velocity": [0.0] * 3,
            "touch": [0.0] * len(_FINGERS),
        }

    def _random_target(self, random: Any) -> list[Any]:
        distance = self.target_radius + self.target_distance * random.uniform()
        sine, cosine = sincos(2.0 * _PI * random.uniform())
        return [distance * cosine, distance * sine, self.target_height * random.uniform()]

    def _touch(self, w: Any) -> list[Any]:
        """1 for each distal link that has a contact with the ball, else 0."""
        touched = [w.var(False) for _ in self._tip_pairs]
        for k in w.range(w.ncon[0]):
            pair = w.contact_pair[k]
            for flag, tip in zip(touched, self._tip_pairs, strict=True):
                flag.value = either(flag.value, pair == tip)
        return [to_float(flag.value) for flag in touched]


def _between(low: Any, high: Any, a: Any) -> Any:
    """`low` for a = -1, `high` for a = 1."""
    return low + (high - low) * ((a + 1.0) * 0.5)


def _polar(v: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Length and direction; as in Brax v1, a short vector's direction is shorter than 1."""
    length = norm(v)
    return length, scale(v, 1.0 / (1e-6 + length))


def _velocity(m: Any, w: Any, body: int) -> Vec:
    """Velocity of a body's centre of mass, from that of its tree's (`cvel`), m/s."""
    arm = sub(w.xipos[body], w.subtree_com[m.body_rootid[body]])
    return add(w.cvel[body][3:], cross(w.cvel[body][:3], arm))
