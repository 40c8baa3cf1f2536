"""LongCat-Flash-Lite (`LongcatFlashNgramForCausalLM`): LongCat-Flash with n-gram embeddings beside the embedding.
Source: arXiv 2601.21204."""

from dataclasses import replace

from afserve.families.latent import longcat_flash
from afserve.families.reading.ngrams import ngram_table

FAMILY = replace(longcat_flash.FAMILY, table=ngram_table)
