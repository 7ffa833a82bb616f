"""Build the CPU kernels in csrc/ into one shared library beside the package.

Everything else of the package is in pyproject.toml. The library has a plain C interface and is
loaded with ctypes: one build fits every Python and PyTorch, hence its name without Python's suffix
and the wheel's tag py3-none-PLATFORM. Each kernel file is compiled once per instruction set; the
library chooses at run time. Where there is no compiler, or it fails, the build says so and the
package has no library; its wheel then is py3-none-any.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# As vision_ttt.ops._native has it.
LIBRARY_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
SOURCES = Path("csrc")
COMMON_SOURCES = ("dispatch.cpp", "sizes.cpp")
KERNELS = tuple(
    path.relative_to(SOURCES).as_posix() for path in sorted(SOURCES.rglob("kernels.cpp"))
)
WINDOWS = sys.platform == "win32"
FLAGS = ["-std=c++17", "-O3", "-g0", *([] if WINDOWS else ["-fPIC"])]
FLAGS += ["-ffp-contract=fast", "-fvisibility=hidden", "-Wall"]
LINK_FLAGS = ["-static"] if WINDOWS else []  # else the library would need MinGW's own beside it
X86 = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": [
        *("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma"),
        "-mprefer-vector-width=512",
    ],
}
X86["avx512bf16"] = [*X86["avx512"], "-mavx512bf16"]
if sys.platform == "linux":  # which dispatch.cpp asks for the use of tile registers
    X86["amx"] = [*X86["avx512bf16"], "-mamx-tile", "-mamx-bf16"]
# What has a kernel for tile registers; the other kernels are those of avx512bf16.
KERNELS_OF = {
    "amx": (
        "blocks/kernels.cpp",
        "blocks/swiglu_mlp/kernels.cpp",
        "products/linear/kernels.cpp",
        "products/packed/kernels.cpp",
        "scans/ttt_linear/forward/kernels.cpp",
    )
}
PROBE = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"


class BuildKernels(build_ext):
    """Compile per instruction set and link once; a failure leaves the package without kernels."""

    def finalize_options(self) -> None:
        # The kernels use the vector extensions of GCC and Clang, which Microsoft's compiler lacks,
        # and GCC does not align AVX registers on Windows' stack. Hence Clang for MinGW.
        if WINDOWS and self.compiler is None:
            self.compiler = "mingw32"
            os.environ.setdefault("CC", "clang")
            os.environ.setdefault("CXX", "clang++")
        super().finalize_options()
        self.in_sources = self.inplace  # setuptools clears it while it builds

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + LIBRARY_SUFFIX

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self.give_up(error)

    def build_extension(self, ext: Extension) -> None:
        try:
            self.build_kernels(ext)
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        self.warn(f"the CPU kernels were not built, PyTorch's operations replace them: {error}")
        self.remove_libraries()
        self.extensions = []  # nothing to copy in an editable install

    def remove_libraries(self) -> None:
        """Remove former builds' libraries, under any name: a wheel takes all that it finds.

        Where this build is for use from the sources, those beside them would hide its failure.
        """
        from_sources = self.editable_mode or self.in_sources
        for folder in (self.build_lib, *(["src"] if from_sources else [])):
            for library in Path(folder, "vision_ttt").glob("_kernels.*"):
                library.unlink()

    def build_kernels(self, ext: Extension) -> None:
        extra = os.environ.get("VISION_TTT_CXXFLAGS", "").split()
        openmp = self.openmp_flags()
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        variants = X86 if x86 else {"baseline": []}
        common = [*FLAGS, *openmp, *extra, *(["-DVISION_TTT_X86"] if x86 else [])]
        common += ["-DVISION_TTT_AMX"] if "amx" in variants else []

        def compile_source(name: str, folder: str, flags: list[str]) -> list[str]:
            return self.compiler.compile(
                [str(SOURCES / name)],
                output_dir=str(Path(self.build_temp) / folder),
                extra_postargs=[*common, *flags],
                depends=ext.depends,
            )

        # The longest first, so that no core waits for the last.
        jobs = [
            (source, isa, [f"-DVISION_TTT_ISA={isa}", *flags])
            for isa, flags in reversed(variants.items())
            for source in KERNELS_OF.get(isa, KERNELS)
        ]
        jobs += [(source, "common", []) for source in COMMON_SOURCES]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(lambda job: compile_source(*job), jobs))
        objects = [name for names in compiled for name in names]
        self.remove_libraries()
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=[*openmp, *LINK_FLAGS, *extra],
            target_lang="c++",
            build_temp=self.build_temp,
        )

    def openmp_flags(self) -> list[str]:
        """["-fopenmp"] where the compiler has OpenMP; without it the kernels run on one thread."""
        # Apple's clang has none. On Windows it would not be PyTorch's, and one process needs one.
        if WINDOWS or sys.platform == "darwin":
            return []
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / "openmp_probe.cpp"
        probe.write_text(PROBE)
        try:
            objects = self.compiler.compile([str(probe)], extra_postargs=["-fopenmp"])
            self.compiler.link_executable(
                objects,
                str(folder / "openmp_probe"),
                extra_postargs=["-fopenmp"],
                target_lang="c++",
            )
        except Exception as error:
            self.warn(f"no OpenMP, the kernels will run on one thread: {error}")
            return []
        return ["-fopenmp"]


class KernelsWheel(bdist_wheel):
    """A wheel for every Python 3, of this platform where it holds the kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = self.get_finalized_command("build_ext").get_outputs()
        has_kernels = any(Path(library).exists() for library in libraries)
        return "py3", "none", super().get_tag()[-1] if has_kernels else "any"


setup(
    ext_modules=[
        Extension(
            "vision_ttt._kernels",
            sources=[str(SOURCES / name) for name in (*COMMON_SOURCES, *KERNELS)],
            depends=[str(path) for path in sorted(SOURCES.rglob("*.h"))],
            language="c++",
        )
    ],
    cmdclass={"bdist_wheel": KernelsWheel, "build_ext": BuildKernels},
)
