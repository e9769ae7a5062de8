"""nutpie."""
import contextlib
@contextlib.contextmanager
def diverted():
    yield
