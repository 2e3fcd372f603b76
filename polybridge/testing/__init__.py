"""What the author of a backend runs in his own tests: the laws of the contract, each a check of its own.

    check_backend(polybridge.get_backend("toy"), [Example(lambda x: toy.sin(x) * x, [np.array([0.5, 1.5])])])

checks all of them; `LAWS` has them one by one, to be given to `pytest.mark.parametrize`.
"""

from polybridge.testing.conformance import LAWS, check_backend
from polybridge.testing.subject import Example, LawError, Subject

__all__ = ["LAWS", "Example", "LawError", "Subject", "check_backend"]
