"""What all tests need."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """Scripts start what runs in the background with SIGINT ignored, and some tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
