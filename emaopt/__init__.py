"""Exponential moving averages for JAX, exact to the last bits."""

from importlib.metadata import version

from emaopt import schedules
from emaopt._decay import (
    decay_from_alpha,
    decay_from_com,
    decay_from_halflife,
    decay_from_span,
    halflife_from_decay,
)
from emaopt._ewm import ewm_corr, ewm_cov, ewm_mean, ewm_std, ewm_var
from emaopt._lookup import eval_params, find_state
from emaopt._overwrite import overwrite
from emaopt._scan import ema_scan, scan, sharded_scan
from emaopt._state import EmaState, Residual, corrected, init, merge, update
from emaopt._transform import ParamsEmaState, ema, params_ema

__version__ = version("emaopt")

__all__ = [
    "EmaState",
    "ParamsEmaState",
    "Residual",
    "corrected",
    "decay_from_alpha",
    "decay_from_com",
    "decay_from_halflife",
    "decay_from_span",
    "ema",
    "ema_scan",
    "eval_params",
    "ewm_corr",
    "ewm_cov",
    "ewm_mean",
    "ewm_std",
    "ewm_var",
    "find_state",
    "halflife_from_decay",
    "init",
    "merge",
    "overwrite",
    "params_ema",
    "scan",
    "schedules",
    "sharded_scan",
    "update",
]
