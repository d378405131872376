"""One thread of torch for small layers, as in the tests of autograd."""

from tests.autograd.conftest import single_thread as single_thread
