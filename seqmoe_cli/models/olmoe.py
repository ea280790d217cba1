"""OLMoE: the layer of Mixtral. What differs is in the checkpoint: the norms of queries and keys
have a weight for each of their elements, so that they are normed over their full width, and the
experts' weights stay as the softmax gives them unless the configuration wants them renormalised."""

from __future__ import annotations

from seqmoe_cli.models.decoder import Decoder

DECODER = Decoder
