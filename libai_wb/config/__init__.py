"""Lazy configurations: describe a run, read it, change it, save it, build it."""
from libai_wb.config.call import (
    InstantiationError, LazyCall, as_config, check_targets, instantiate, locate, target_name)
from libai_wb.config.registry import Registry, configurable, register
from libai_wb.config.values import ConfigKeyError, parse_override, parse_value
from libai_wb.config.lazy import LazyConfig, get_config, portable, try_get_key
from libai_wb.config.checks import (
    FrozenError, defrost, diff, freeze, nearest, override_strict, unfrozen, unknown_keys)
