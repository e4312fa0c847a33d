"""Parts of kernels: functions that are compiled with each kernel that calls them, and not alone.

Numba optimizes a function and makes machine code of it before another may call it, and then does so again within the
other. Of kernels that call many small functions this is most of what compiling takes. The module knows how Numba keeps
code that is not final (`numba.core.codegen`, alike from 0.61 on); without it all works, and compiles for longer.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

__all__ = ["PartCompiler"]


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """Code that is linked into that of its callers as it is, and never run for itself."""

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
        # What stands for the address of the code that is not made: callers find the part by it.
        state.cr = state.cr._replace(cfunc=[].append)
        state.targetctx.insert_user_function(state.cr.cfunc, state.cr.fndesc, [state.library])
        return True


class PartCompiler(Compiler):  # type: ignore[misc]
    """Numba's compiler, up to code that is not final."""

    def define_pipelines(self) -> Any:
        (passes,) = super().define_pipelines()
        passes.passes = [(_PartLowering if one is NativeLowering else one, what) for one, what in passes.passes]
        passes._finalized = False
        passes.finalize()
        return [passes]
