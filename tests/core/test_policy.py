"""opkiln.use, OPKILN_BACKEND and the policy's string form."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import opkiln
import pytest
from opkiln import policy
from opkiln.policy import DEFAULT, Policy, parse_preference


@pytest.mark.parametrize(
    "text, expected",
    [
        ("torch", ("*", ("torch",))),
        ("quack,torch", ("*", ("quack", "torch"))),
        ("rms_norm:quack, torch", ("rms_norm", ("quack", "torch"))),
    ],
)
def test_preference_is_read(text, expected):
    assert parse_preference(text) == expected


@pytest.mark.parametrize("text", ["", ":", "rms_norm:", ":torch", ","])
def test_unreadable_preference_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="cannot read the backend preference") as caught:
        parse_preference(text)
    assert "\n" not in str(caught.value)


def test_use_nests_and_restores():
    before = policy.current()
    with opkiln.use("torch", deterministic=True):
        with opkiln.use("rms_norm:torch-ref"):
            inner = policy.current()
            assert inner.deterministic
            assert inner.backends_for("rms_norm") == ("torch-ref", "torch")
            assert inner.backends_for("max_pool2d") == ("torch",)
        assert policy.current().backends_for("rms_norm") == ("torch",)
    assert policy.current() == before


def test_use_restores_after_an_error():
    before = policy.current()
    with pytest.raises(ZeroDivisionError), opkiln.use("torch"):
        raise ZeroDivisionError
    assert policy.current() == before


def test_unknown_flag_is_named():
    with pytest.raises(TypeError, match="unknown flag 'determinstic', allowed are strict, determ"):
        with opkiln.use("torch", determinstic=True):
            pass


def test_a_preference_for_an_unknown_op_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"opkiln\.use: no op 'rms_nrom'; the nearest are rms_norm,"
    ):
        with opkiln.use("rms_nrom:torch"):
            pass


@pytest.mark.parametrize("wrong", [3, None, ("torch",)])
def test_a_preference_is_a_string(wrong):
    with pytest.raises(TypeError, match="a backend preference must be a string, got"):
        with opkiln.use(wrong):
            pass


def test_policy_belongs_to_the_thread():
    seen = []
    with opkiln.use("torch-ref"):
        thread = threading.Thread(target=lambda: seen.append(policy.current()))
        thread.start()
        thread.join()
    assert seen == [policy.BASE]


@pytest.mark.parametrize(
    "value",
    [
        DEFAULT,
        Policy(deterministic=True),
        Policy(prefer=(("*", ("torch",)), ("rms_norm", ("a", "b"))), strict=True, checks=True),
    ],
)
def test_string_form_is_lossless(value):
    assert Policy.decode(value.encode()) == value


def test_default_policy_is_the_empty_string():
    assert DEFAULT.encode() == ""


def test_environment_is_read_at_import():
    code = "from opkiln import policy; print(policy.current())"
    env = os.environ | {"OPKILN_BACKEND": "torch;rms_norm:torch-ref,torch", "OPKILN_CHECKS": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "('*', ('torch',)), ('rms_norm', ('torch-ref', 'torch'))" in out
    assert "checks=True" in out


def test_an_unreadable_environment_does_not_stop_the_import():
    env = os.environ | {"OPKILN_BACKEND": ":;torch", "PYTHONWARNINGS": "always"}
    code = "import opkiln; print(opkiln.policy.current().prefer, opkiln.policy.UNREADABLE)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("(('*', ('torch',)),) (\"cannot read the backend preference ':'")
    assert "OPKILN_BACKEND is ignored in part" in done.stderr
