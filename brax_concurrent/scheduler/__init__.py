"""Which tasks may run at once: footprints, the window, and the schedulers built on them."""
