"""The documentation's lines that set up logging for a script and the libraries that it uses."""

LOGGING = """
logger = logging.getLogger(__name__)

# 设置日志记录
logging.basicConfig(
    format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
    datefmt="%m/%d/%Y %H:%M:%S",
    handlers=[logging.StreamHandler(sys.stdout)],
)

# 根据节点设置主代码和其使用的模块的相同日志级别
log_level = training_args.get_process_log_level()
logger.setLevel(log_level)
datasets.utils.logging.set_verbosity(log_level)
transformers.utils.logging.set_verbosity(log_level)

trainer = Trainer(...)
"""
