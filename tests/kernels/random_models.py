"""Random robots as MJCF text: every feature of the kernels, in combinations that no robot of ours has."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import numpy as np

NUM_MODELS = 50


class _Generator:
    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.joints: list[str] = []
        self.bodies = 0

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def uniform(self, low: float, high: float, size: int | None = None) -> str:
        return _text(self.rng.uniform(low, high, size))

    def normal(self, size: int, scale: float = 1.0) -> str:
        return _text(self.rng.normal(size=size) * scale)

    # -- model

    def model(self, integrator: str) -> str:
        root = ET.Element("mujoco")
        ET.SubElement(root, "compiler", angle="radian", balanceinertia="true")
        gravity = self.normal(3, 5.0) if self.chance(0.3) else "0 0 -9.81"
        # Damping of light limbs would blow up in larger explicit steps.
        timestep = self.uniform(0.001, 0.01) if integrator == "Euler" else self.uniform(0.0003, 0.001)
        option = ET.SubElement(root, "option", integrator=integrator, gravity=gravity, timestep=timestep)
        flags = {name: "disable" for name in ("eulerdamp", "spring", "damper", "clampctrl") if self.chance(0.1)}
        ET.SubElement(option, "flag", flags)
        world = ET.SubElement(root, "worldbody")
        ET.SubElement(world, "geom", type="plane", size="10 10 1", friction=self.uniform(0.3, 1.5, 3))
        for _ in range(self.rng.integers(1, 4)):
            self.tree(world)
        self.actuators(ET.SubElement(root, "actuator"))
        return ET.tostring(root, encoding="unicode")

    def tree(self, world: ET.Element) -> None:
        """A tree with a floating base, or one that starts from the world or a mocap body."""
        base = self.rng.choice(["free", "world", "mocap"], p=[0.5, 0.35, 0.15])
        body = self.body(world, self.uniform(-1, 1, 2) + " " + self.uniform(0.5, 1.5))
        if base == "free":
            joint = ET.SubElement(body, "freejoint") if self.chance(0.5) else ET.SubElement(body, "joint", type="free")
            if joint.tag == "joint" and self.chance(0.5):
                joint.attrib |= {"damping": self.uniform(0.1, 1), "armature": self.uniform(0.01, 0.1)}
        elif base == "mocap":
            body.set("mocap", "true")
            body = self.body(body)
            self.joint_stack(body, at_least=1)
        else:
            self.joint_stack(body, at_least=1)
        for _ in range(self.rng.integers(0, 3)):
            self.limb(body, depth=int(self.rng.integers(1, 4)))

    def limb(self, parent: ET.Element, depth: int) -> None:
        body = self.body(parent)
        self.joint_stack(body, at_least=0)
        for _ in range(self.rng.integers(1, 3) if depth > 1 else 0):
            self.limb(body, depth - 1)

    def body(self, parent: ET.Element, pos: str | None = None) -> ET.Element:
        self.bodies += 1
        body = ET.SubElement(parent, "body", pos=pos or self.uniform(-0.4, 0.4, 3))
        if self.chance(0.5):
            body.set("quat", self.normal(4))
        for _ in range(self.rng.integers(1, 3)):
            self.geom(body)
        if self.chance(0.3):
            self.inertial(body)
        return body

    def geom(self, body: ET.Element) -> None:
        geom = ET.SubElement(body, "geom", density=self.uniform(200, 2000), condim=str(self.rng.choice([1, 3])))
        geom.set("friction", self.uniform(0.3, 1.5, 3))
        if self.chance(0.3):
            geom.attrib |= {"pos": "0 0 0", "type": "sphere", "size": self.uniform(0.05, 0.15)}
        elif self.chance(0.5):
            geom.attrib |= {
                "type": "capsule",
                "size": self.uniform(0.03, 0.1),
                "fromto": self.uniform(-0.2, 0.2, 6),
            }
        else:
            geom.attrib |= {
                "type": "capsule",
                "size": self.uniform(0.03, 0.15, 2),
                "pos": self.uniform(-0.1, 0.1, 3),
            }
            geom.set("quat", self.normal(4))
        if self.chance(0.3):
            geom.attrib |= {
                "margin": self.uniform(0, 0.02),
                "solref": f"{self.uniform(0.01, 0.05)} {self.uniform(0.5, 1.5)}",
            }
        if self.chance(0.3):
            geom.attrib |= {
                "contype": str(self.rng.integers(1, 4)),
                "conaffinity": str(self.rng.integers(1, 4)),
            }

    def inertial(self, body: ET.Element) -> None:
        inertial = ET.SubElement(body, "inertial", mass=self.uniform(0.2, 3), pos=self.uniform(-0.1, 0.1, 3))
        if self.chance(0.3):
            inertial.set("pos", "0 0 0")
        moments = self.rng.uniform(0.005, 0.05, 3)
        diagonal = moments.sum() - moments  # of three point masses, so that no moment exceeds the other two's sum
        if self.chance(0.5):
            inertial.set("diaginertia", _text(diagonal))
            if self.chance(0.5):
                inertial.set("quat", self.normal(4))
        else:
            turn = np.linalg.qr(self.rng.normal(size=(3, 3)))[0]
            full = turn @ np.diag(diagonal) @ turn.T
            inertial.set("fullinertia", _text(full[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]))

    # -- joints and actuators

    def joint_stack(self, body: ET.Element, at_least: int) -> None:
        pos = self.uniform(-0.2, 0.2, 3)
        # Axes of a stack are far from parallel: near gimbal lock rounding decides what the acceleration is.
        axes = np.linalg.qr(self.rng.normal(size=(3, 3)))[0] + self.rng.normal(size=(3, 3)) * 0.1
        for axis in axes[: self.rng.integers(at_least, 4)]:
            kind = "slide" if self.chance(0.25) else "hinge"
            name = f"joint_{len(self.joints)}"
            self.joints.append(name)
            joint = ET.SubElement(body, "joint", name=name, type=kind)
            joint.set("axis", _text(np.round(axis) if self.chance(0.3) and np.round(axis).any() else 1.5 * axis))
            joint.set("pos", self.uniform(-0.2, 0.2, 3) if self.chance(0.3) else pos)
            for attribute, low, high in (
                ("ref", -0.5, 0.5),
                ("springref", -0.5, 0.5),
                ("stiffness", 1, 50),
                ("damping", 0.05, 1),
                ("armature", 0.01, 1),
            ):
                if self.chance(0.4):
                    joint.set(attribute, self.uniform(low, high))
            if self.chance(0.5):
                joint.set("range", f"{self.uniform(-1.0, -0.2)} {self.uniform(0.2, 1.0)}")

    def actuators(self, parent: ET.Element) -> None:
        for joint in self.joints:
            if self.chance(0.6):
                kind = str(self.rng.choice(["motor", "position", "velocity", "general"]))
                actuator = ET.SubElement(parent, kind, joint=joint, gear=self.uniform(-2, 2))
                if kind == "general":
                    actuator.attrib |= {
                        "gainprm": self.uniform(1, 5),
                        "biastype": "affine",
                        "biasprm": self.normal(3),
                    }
                elif kind != "motor":
                    actuator.set(*(("kp", self.uniform(1, 20)) if kind == "position" else ("kv", self.uniform(0.1, 1))))
                for attribute, size in (("ctrlrange", 1.0), ("forcerange", 3.0)):
                    if self.chance(0.5):
                        actuator.set(attribute, f"{self.uniform(-size, 0)} {self.uniform(0.1 * size, size)}")


def _text(numbers: np.ndarray | float) -> str:
    return " ".join(f"{x:.6g}" for x in np.atleast_1d(numbers))


def random_model(seed: int) -> str:
    """MJCF of random robot number `seed`, 0 .. NUM_MODELS - 1; even ones use Euler, odd ones RK4."""
    return _Generator(seed).model("RK4" if seed % 2 else "Euler")
