"""Configuration: frozen sections, read once from flags, a YAML file, the environment and defaults, in that order.

Every option is declared once, as a field of a section. Its flag, YAML key, environment variable and help text follow
from that declaration: `SpeculativeSection.num_steps` is `--speculative-num-steps`, `speculative-num-steps:` and
`EAGLE_SERVER_SPECULATIVE_NUM_STEPS`. No other module reads the environment.
"""

from eagle_server.config.base import ConfigError, HubGGUF
from eagle_server.config.device import DeviceSection
from eagle_server.config.observability import ObservabilitySection
from eagle_server.config.sections import (
    DEMO_DRAFT,
    DEMO_TARGET,
    CacheSection,
    Config,
    ModelSection,
    SchedulerSection,
    ServerSection,
)
from eagle_server.config.sources import changed_options, from_options, parse_args
from eagle_server.config.speculative import SpeculativeSection
from eagle_server.config.trees import TreeOptions

__all__ = [
    "DEMO_DRAFT",
    "DEMO_TARGET",
    "CacheSection",
    "Config",
    "ConfigError",
    "DeviceSection",
    "HubGGUF",
    "ModelSection",
    "ObservabilitySection",
    "SchedulerSection",
    "ServerSection",
    "SpeculativeSection",
    "TreeOptions",
    "changed_options",
    "from_options",
    "parse_args",
]
