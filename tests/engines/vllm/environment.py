"""What every process of these tests sets before vLLM is imported: ``os.environ.update(ENVIRONMENT)``."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process unless a test says otherwise
    "TORCHDYNAMO_DISABLE": "1",  # else 26 s of compilation at the first generate
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
