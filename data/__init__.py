"""Text to batches: corpora (through `datasets`), tokenizers (through `tiktoken`), token files; tasks; batches."""

from data.batches import draw_batch, draw_positions
from data.corpora import DataConfig
from data.tasks import Task
from data.tokenizers import get_tokenizer
from data.tokens import TokenFiles, prepare

__all__ = ["DataConfig", "Task", "TokenFiles", "draw_batch", "draw_positions", "get_tokenizer", "prepare"]
