"""FlashInfer's own planner of fa2 prefills: cut out of the installed headers and compiled by g++, without CUDA."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.flashinfer_planner import Planned

STUBS = """
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>
#include "allocator.h"
typedef int cudaError_t;
typedef int cudaStream_t;
enum { cudaSuccess, cudaMemcpyHostToDevice, cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
static int multiprocessors = 0;
static int cudaGetDevice(int*) { return 0; }
static int cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? multiprocessors : 232448;
  return 0;
}
static int cudaMemcpyAsync(void* to, const void* from, size_t size, int, int) { return memcpy(to, from, size), 0; }
#define FLASHINFER_CUDA_CALL(call) call
static std::pair<int, int> GetCudaComputeCapability() { return {9, 0}; }
template <typename A, typename B> constexpr A ceil_div(const A x, const B y) { return (x + y - 1) / y; }
namespace flashinfer {
"""
CALL = """
}
extern "C" int plan(int sms, int32_t* qo_indptr, int32_t* kv_indptr, int bs, int heads, int kv_heads, int dim,
                    int graph, int window, int disable, int uniform, char* ints, char* pinned, int size,
                    int64_t* info) {
  multiprocessors = sms;
  flashinfer::PrefillPlanInfo found;
  void* floats = reinterpret_cast<void*>(1 << 20);  // only its offsets are computed
  size_t float_bytes = 0, int_bytes = 0;
  try {
    flashinfer::PrefillPlanImpl<true, int32_t>(float_bytes, int_bytes, floats, size_t(1) << 40, ints, pinned, size,
        found, qo_indptr, kv_indptr, qo_indptr[bs], bs, heads, kv_heads, dim, dim, 1, graph, 2, window, -1, disable, 0,
        uniform, 0);
  } catch (int) {
    return 1;
  }
  std::vector<int64_t> numbers = found.ToVector();
  std::copy(numbers.begin(), numbers.end(), info);
  return (int)numbers.size();
}
"""
FUNCTIONS = (
    ("utils.cuh", "inline uint32_t FA2DetermineCtaTileQ("),
    ("attention/scheduler.cuh", "inline auto PrefillBinarySearchKVChunkSize("),
    ("attention/scheduler.cuh", "template <typename IdType>\ninline auto PrefillSplitQOKVIndptr("),
    ("attention/scheduler.cuh", "struct PrefillPlanInfo {"),
    ("attention/scheduler.cuh", "template <bool MATERIALIZE, typename IdType>\ninline cudaError_t PrefillPlanImpl("),
)


def _cut(text: str, beginning: str) -> str:
    """The definition that begins so, to its closing brace."""
    start = text.index(beginning)
    depth = 0
    for place in range(text.index("{", start), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start : place + 1]
    raise ValueError(f"{beginning} does not end")


class Planner:
    """The compiled planner."""

    def __init__(self, folder: Path) -> None:
        """Skips the test without g++ or FlashInfer."""
        compiler, found = shutil.which("g++"), importlib.util.find_spec("flashinfer")
        if compiler is None:
            pytest.skip("no g++")
        if found is None or not found.submodule_search_locations:
            pytest.skip("flashinfer-python is not installed")
        include = Path(found.submodule_search_locations[0]) / "data" / "include" / "flashinfer"
        cut = [_cut((include / file).read_text(encoding="utf-8"), beginning) for file, beginning in FUNCTIONS]
        (folder / "allocator.h").write_text(
            '#include <string>\n#include "exception_macros.h"\n'
            + (include / "allocator.h").read_text(encoding="utf-8").replace('#include "exception.h"', "")
        )
        (folder / "exception_macros.h").write_text(
            "#define FLASHINFER_ERROR(message) throw 1\n"
            "#define FLASHINFER_CHECK(condition, ...) do { if (!(condition)) throw 1; } while (0)\n"
        )
        source, library = folder / "planner.cpp", folder / "planner.so"
        source.write_text(STUBS + ";\n".join(cut) + ";\n" + CALL)
        command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        self._plan = ctypes.CDLL(str(library)).plan

    def plan(self, ints: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, given: Planned) -> list[int]:
        """Write the plan of these lengths to the int workspace. Returns `PrefillPlanInfo`."""
        pinned, info = torch.zeros_like(ints), torch.zeros(32, dtype=torch.int64)
        numbers = given.heads, given.kv_heads, given.dim, int(given.graph), given.window, int(given.disable_split_kv)
        buffers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (ints, pinned))
        indptr = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (qo_indptr, kv_indptr))
        count = self._plan(
            given.sms,
            *indptr,
            len(kv_indptr) - 1,
            *numbers,
            given.uniform,
            *buffers,
            len(ints),
            ctypes.c_void_p(info.data_ptr()),
        )
        assert count > 1, "the planner raised an error"
        found: list[int] = info[:count].tolist()
        return found
