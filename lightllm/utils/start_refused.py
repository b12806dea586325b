"""StartRefused: a start that fails for a reason outside of the code."""


class StartRefused(Exception):
    """What is wrong with a flag or a checkpoint, said to whoever starts the server: a stack would not help."""
