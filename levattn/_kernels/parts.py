"""Functions that Numba compiles within each kernel that calls them, and not alone, which takes less time.

Numba optimizes a function and makes its machine code before another function may call it, and then repeats that work
within the caller. For kernels that call many small functions, this is most of the compile time. The module depends on
how Numba keeps code that is not final (`numba.core.codegen`, the same from 0.61 on). Without it all works, but takes
longer to compile.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """Code that its callers link in as it is, and that never runs alone."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):  # type: ignore[misc]
    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        # A unique stand-in for the address of machine code, of which there is none: callers find the part by it.
        state.cr = state.cr._replace(cfunc=[].append)
        state.targetctx.insert_user_function(state.cr.cfunc, state.cr.fndesc, [state.library])
        return True


class PartCompiler(Compiler):  # type: ignore[misc]
    """Numba's compiler, without the steps that finish code."""

    def define_pipelines(self) -> Any:
        (passes,) = super().define_pipelines()
        passes.passes = [(_PartLowering if one is NativeLowering else one, what) for one, what in passes.passes]
        passes._finalized = False
        passes.finalize()
        return [passes]
