# pyright sees nothing of cuda.core, which picks its contents when it is imported
from typing import Any

def __getattr__(name: str) -> Any: ...
