"""The compiled part is there where it can be, is left out where it cannot, and says what is wrong with a setting."""

import _ctypes
import logging
import shutil
import subprocess
import sys

import pytest

from swift import native
from swift.bench.record import facts
from swift.errors import ConfigError


@pytest.fixture
def fresh():
    native.kernels.cache_clear()
    yield
    native.kernels.cache_clear()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_package_is_installed_with_it_where_there_is_a_compiler(fresh, monkeypatch):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    found = native.kernels()
    assert found is not None
    assert found.instructions in ("avx512", "avx2", "plain")
    assert facts()["machine"]["native"] == found.instructions


def test_without_the_library_there_are_no_kernels_and_it_is_said_once(fresh, monkeypatch, caplog):
    monkeypatch.setattr(native, "library_path", lambda: None)
    with caplog.at_level(logging.INFO, logger="swift.native"):
        assert native.kernels() is None
        assert native.kernels() is None
    assert [record.message for record in caplog.records] == [
        "swift was installed without its compiled part (no C compiler?): a CPU takes longer to sample and to train"
    ]


def test_a_library_of_another_machine_is_left_out_with_a_warning(fresh, monkeypatch, caplog, tmp_path):
    (tmp_path / "_decode.so").write_bytes(b"built for another machine")
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "_decode.so")
    assert native.kernels() is None
    assert "install swift again" in caplog.text


@pytest.mark.skipif(native.library_path() is None, reason="swift was installed without a compiler")
def test_a_library_that_was_compiled_from_other_sources_is_left_out_with_a_warning(fresh, monkeypatch, caplog):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(native, "sources_digest", lambda: "what an update has brought")
    assert native.kernels() is None
    assert "was not compiled from the sources beside it" in caplog.text and "install swift again" in caplog.text


def test_a_library_that_knows_nothing_of_its_sources_is_left_out(fresh, monkeypatch, caplog):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(native, "library_path", lambda: _ctypes.__file__)  # any library will do
    assert native.kernels() is None
    assert "install swift again" in caplog.text


@pytest.mark.skipif(native.library_path() is None, reason="swift was installed without a compiler")
def test_without_threads_of_pytorch_it_is_left_out(fresh, monkeypatch, caplog):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(native, "_use_threads", lambda library: False)
    with caplog.at_level(logging.INFO, logger="swift.native"):
        assert native.kernels() is None
    assert "cannot be used" in caplog.text


def test_the_variable_switches_it_off(fresh, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "0")
    assert native.kernels() is None


@pytest.mark.skipif(native.library_path() is None, reason="swift was installed without a compiler")
def test_an_instruction_set_that_is_not_there_is_an_error_that_says_what_to_do(fresh, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match=r"SWIFT_NATIVE: 'avx1024' is nothing .* unset it, or set it to 0"):
        native.kernels()


@pytest.mark.skipif(native.library_path() is None, reason="swift was installed without a compiler")
def test_the_threads_are_those_of_pytorch():
    """A second OpenMP runtime in the process would be one more library of that kind."""
    script = (
        "import os, torch\n"
        "def runtimes():\n"
        "    files = {line.split()[-1] for line in open('/proc/self/maps')}\n"
        "    return {file for file in files if 'omp' in os.path.basename(file)}\n"
        "before = runtimes()\n"
        "from swift.native import kernels\n"
        "found = kernels()\n"
        "print(found.threaded, before, runtimes() - before)\n"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("True") and printed.rstrip().endswith("set()"), printed
