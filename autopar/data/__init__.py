"""Training data: documents to shards of tokens, and the batch of any step from them.

prepare(["corpus.jsonl"], tokenizer="model-folder", out="tokens")     # once
stream = Stream(TokenStore("tokens"), batch=32, seq=2048, seed=0)
for batch in stream.from_position(0): ...                             # the same on any layout, after any resume
"""

from autopar.data.ahead import Ahead
from autopar.data.documents import Document, documents
from autopar.data.order import Order
from autopar.data.prepare import prepare
from autopar.data.store import TokenStore
from autopar.data.stream import Stream

__all__ = ["Ahead", "Document", "Order", "Stream", "TokenStore", "documents", "prepare"]
