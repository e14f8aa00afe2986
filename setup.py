"""Builds the native kernels into the package; everything else is in pyproject.toml.

Each kernel source is compiled once per instruction set and the library chooses at run time, so a wheel built anywhere
runs anywhere. Without a working compiler the install goes on: the same functions then run in torch.
"""

import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, LinkError, PlatformError

HERE = "latte/ops/native"
KERNELS = [path.as_posix() for path in sorted(Path(HERE).glob("*.cpp")) if path.stem not in ("dispatch", "check")]
HEADERS = [path.as_posix() for path in sorted(Path(HERE).glob("*.h"))]
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-fno-exceptions", "-g0"]
X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c", "-mprefer-vector-width=512"],
}


class BuildKernels(build_ext):
    """Compiles the kernels several times over and links them into one plain shared library."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python version in the name: the library is loaded with ctypes and knows nothing of Python."""
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """There is no PyInit function to export."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Compile and link, or say in one line that torch will serve instead."""
        try:
            self._build(ext)
        except (CCompilerError, ExecError, PlatformError, OSError) as error:
            reason = " ".join(str(error).split())
            print(f"latte: native kernels not built ({reason}); the torch path will serve", flush=True)

    def _objects(self, sources: list[str], name: str, flags: list[str]) -> list[str]:
        out = str(Path(self.build_temp) / name)

        def one(source: str) -> list[str]:
            return self.compiler.compile([source], output_dir=out, extra_postargs=FLAGS + flags, depends=HEADERS)

        with ThreadPoolExecutor() as pool:
            return [obj for objs in pool.map(one, sources) for obj in objs]

    def _openmp(self) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            probe = Path(folder) / "probe.cpp"
            probe.write_text("#include <omp.h>\nint latte_probe() { return omp_get_max_threads(); }\n")
            try:
                objects = self.compiler.compile([str(probe)], output_dir=folder, extra_postargs=["-fopenmp"])
                self.compiler.link_shared_object(objects, str(Path(folder) / "probe.so"), extra_postargs=["-fopenmp"])
            except (CompileError, LinkError):
                return []
        return ["-fopenmp"]

    def _build(self, ext: Extension) -> None:
        openmp = self._openmp()
        objects = self._objects(KERNELS, "portable", ["-DLATTE_ISA=portable", *openmp])
        have = []
        if platform.machine().lower() in ("x86_64", "amd64"):
            for isa, flags in X86.items():
                try:
                    objects += self._objects(KERNELS, isa, [f"-DLATTE_ISA={isa}", *flags, *openmp])
                except CompileError:  # an old compiler: the narrower sets remain
                    continue
                have.append(f"-DLATTE_WITH_{isa.upper()}")
        objects += self._objects([f"{HERE}/dispatch.cpp"], "dispatch", have + openmp)
        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(objects, target, extra_postargs=openmp, target_lang="c++")


class AnyPython(bdist_wheel):
    """A wheel of this platform for every Python 3: the library has a plain C interface, and the rest is Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    # `optional` lets an editable install go on without the library.
    ext_modules=[
        Extension(
            "latte.ops.native._kernels",
            [*KERNELS, f"{HERE}/dispatch.cpp"],
            depends=HEADERS,
            optional=True,
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
)
