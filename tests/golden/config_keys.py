"""Records the keys that transformers reads in `config.json` for each family.

    pip install -r requirements.txt
    python config_keys.py > config_keys.json

The keys are the fields of the configuration class, their other names (`attribute_map`) and those that the class takes
from older files. A test of fsdp-train checks that each is applied, refused by name, or listed as without effect.
"""

import inspect
import json
import re
import warnings

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.modeling_rope_utils import RotaryEmbeddingConfigMixin

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "deepseek_v2"]
FAMILIES += ["deepseek_v3", "gpt_oss", "gpt2", "bert"]
# Keys of loading and of the hub, which no file has.
CALLS = {"name_or_path", "commit_message", "repo_id", "token", "revision", "local_files_only", "cache_dir"}
CALLS |= {"force_download", "proxies", "trust_remote_code", "subfolder", "gguf_file", "return_unused_kwargs"}
CALLS |= {"_from_pipeline", "_from_auto", "_commit_hash", "_configuration_file"}


def older(cls):
    """Returns the keys that the source takes from `kwargs`."""
    return set(re.findall(r"kwargs\.(?:get|pop)\(\s*\"(\w+)\"", inspect.getsource(cls)))


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = {}
    for family in FAMILIES:
        config = CONFIG_MAPPING[family]()
        keys = set(config.to_dict()) | set(config.attribute_map) | older(type(config)) | older(PretrainedConfig)
        if isinstance(config, RotaryEmbeddingConfigMixin):
            keys |= older(RotaryEmbeddingConfigMixin)
        found[family] = sorted(keys - CALLS)
    print(json.dumps({"transformers": transformers.__version__, "families": found}, indent=1))


main()
