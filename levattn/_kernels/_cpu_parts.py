"""Helpers of compiled code that become part of the kernels that call them, and are not compiled alone."""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

__all__ = ["PartCompiler"]


class _Part(JITCodeLibrary):
    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):
    _name = "part_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)

        lowered = state["cr"]._replace(cfunc=[].append)  # a key of its own
        state.targetctx.insert_user_function(lowered.cfunc, lowered.fndesc, [state.library])
        state["cr"] = lowered
        return True


class PartCompiler(Compiler):
    def define_pipelines(self) -> Any:
        (manager,) = super().define_pipelines()
        manager._finalized = False
        manager.passes = [(_PartLowering if one is NativeLowering else one, about) for one, about in manager.passes]
        manager.finalize()
        return [manager]
