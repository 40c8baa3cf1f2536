"""From a body's fields to what one model's engine is asked for: chat template, tokens. One pure function.

Which model a body asks for is found in `preparers`. It runs on the event loop for small bodies and in a text process
for all others (`text_pool`); what it gives back travels as bytes (`prepared`). Everything is counted before anything is
tokenized. Knows no HTTP and no engine.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from afserve.config_json import ConfigFields
from afserve.engine.scheduling.request import SamplingParams
from afserve.errors import RequestError, shown
from afserve.grammars.grammar import Compiler
from afserve.server.bodies.changing_lines import ChangingLines
from afserve.server.bodies.declared import (
    PREDICTION,
    GenerationBody,
    SamplingFields,
    TokenizeBody,
    scheduling_of,
)
from afserve.server.bodies.fields import Fields
from afserve.server.bodies.messages import pictures_of
from afserve.server.bodies.openai import (
    ChatRequest,
    CompletionRequest,
    chat_request,
    completion_request,
    embedding_request,
    prompt_count,
)
from afserve.server.bodies.prediction import expected_words
from afserve.server.bodies.prepared import Answer, Computed, ContextLengthError, EchoText, Prepared
from afserve.server.bodies.sampling import sampling_params
from afserve.server.bodies.structured import Formats, WantedGrammar, asks_format
from afserve.server.reading.table import Reading
from afserve.server.surfaces import anthropic, ollama
from afserve.server.surfaces.translate import Translated, named, own_name, refuse_resume
from afserve.server.text.conversation import Conversation, conversation_of
from afserve.server.text.kinds import TRANSLATED, BodyKind
from afserve.server.text.next_turn import answer_message, followed, unchanging
from afserve.server.text.picture import Picture
from afserve.server.text.pictures import PictureReader
from afserve.server.text.prompt_tokens import Elsewhere, PromptTokens, TextModel
from afserve.server.text.tokenizer_facts import tokenizer_facts
from afserve.tokens.chat_template import ChatTemplate
from afserve.tokens.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16


class Preparer:
    """`prepare` of one model. `template` None: the model has none; with `elsewhere` another process renders it, and
    compiles grammars."""

    def __init__(
        self,
        model: TextModel,
        tokenizer: Tokenizer,
        defaults: SamplingParams,
        template: ChatTemplate | None = None,
        *,
        compiler: Compiler | None = None,
        pictures: PictureReader | None = None,
        elsewhere: bool = False,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._tokens = PromptTokens(model, tokenizer, elsewhere=elsewhere)
        self._defaults = defaults
        self._conversation = conversation_of(template, tokenizer)
        self._formats = Formats(compiler)
        self._lines = ChangingLines(model.changing_lines)
        self._elsewhere = elsewhere
        self._pictures = pictures or PictureReader(None, ConfigFields({}, ""), tokenizer)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request may call this model, the one that answers have first."""
        return (self._model.name, *self._model.aliases)

    def prepare(self, kind: BodyKind, fields: Fields) -> Answer:
        """Raises RequestError, or another refusal of the caller's, that names the field."""
        answer = self._prepare(kind, fields)
        if fields.passed and self._model.strict:
            name, instead = next(iter(fields.passed.items()))
            raise RequestError.about(
                name, f"is not supported; {instead} (without --strict it is passed over)"
            )
        ignored = tuple(fields.passed)
        return Computed(answer, ignored) if isinstance(answer, bytes) else replace(answer, ignored=ignored)

    def _prepare(self, kind: BodyKind, fields: Fields) -> Prepared | bytes:
        fields = Fields(self._lines.left_out(fields.raw()), passed=fields.passed)
        if kind is BodyKind.COMPLETION:
            self._check_sequences(prompt_count(fields), SamplingFields(fields).n)
            if self._elsewhere and asks_format(fields):
                raise Elsewhere
            return self._completion(completion_request(fields))
        if kind is BodyKind.EMBEDDING:
            return self._embedding(fields, fields)
        if kind is BodyKind.OLLAMA_EMBED:
            return self._embedding(Fields(ollama.translate_embed(fields)), fields)
        if kind is BodyKind.CHAT:
            return self._chat(chat_request(fields))
        if kind in TRANSLATED:
            return self._translated(kind, fields)
        if kind is BodyKind.NEXT_TURN:
            return self._next_turn(fields)
        if kind is BodyKind.TOKENIZE:
            return self._tokenize(fields)
        if kind is BodyKind.DETOKENIZE:
            return self._detokenize(fields)
        assert kind is BodyKind.TOKENIZER, kind
        return self._about_tokenizer()

    def _completion(
        self, asked: CompletionRequest, default: int | None = DEFAULT_COMPLETION_TOKENS
    ) -> Prepared:
        prompts = [self._tokens.ids(prompt, asked.add_special_tokens, "prompt") for prompt in asked.prompts]
        wanted = 1 if asked.wanted_tokens == 0 else asked.wanted_tokens
        rooms = [self._tokens.tokens_left(len(ids), wanted, default, "prompt") for ids in prompts]
        params = sampling_params(
            asked.sampling,
            self._defaults,
            max_tokens=min(rooms),
            logprobs=asked.logprobs,
            echo=asked.echo,
            grammar=self._formats.checked(asked.wanted),
        )
        echo = self._tokens.echo(asked, prompts) if asked.echo else None
        return self._prepared(prompts, params, asked, echo, wanted=asked.wanted)

    def _embedding(self, body: Fields, fields: Fields) -> Prepared:
        """Each input of an OpenAI body with room for one token, which nobody reads; `fields` is what was sent."""
        self._check_sequences(prompt_count(body, "input"), 1, "input")
        asked = embedding_request(body)
        prompts = [self._tokens.ids(text, asked.add_special_tokens, "input") for text in asked.inputs]
        for ids in prompts:
            self._tokens.tokens_left(len(ids), None, None, "input")
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooled=True)
        scheduling, facts = scheduling_of(fields), {"base64": asked.base64}
        return Prepared(
            tuple(prompts), params, None, None, True, None, scheduling, None, facts, model=self._model.name
        )

    def _chat(self, asked: ChatRequest) -> Prepared:
        self._check_sequences(1, SamplingFields(asked.sampling).n)
        conversation, prompt, pictures = self._render(asked)
        ids = self._tokens.ids(prompt, False, "messages")
        tiles = self._pictures.locate(ids, pictures)
        if tiles and asked.resume is not None:
            raise RequestError.about("resume", "is not served with pictures; leave it out")
        wanted = conversation.format(asked, prompt)
        grammar = self._formats.checked(wanted)
        reading = conversation.reading(asked, prompt)
        newer = asked.sampling.get("max_completion_tokens") is not None
        field = "max_completion_tokens" if newer else "max_tokens"
        room = self._tokens.tokens_left(len(ids), asked.wanted_tokens, None, "messages", field)
        params = sampling_params(
            asked.sampling, self._defaults, max_tokens=room, logprobs=asked.logprobs, grammar=grammar
        )
        skips = not conversation.shows_special(reading)
        prepared = self._prepared([ids], params, asked, None, reading, skips=skips, wanted=wanted)
        return replace(prepared, tiles=tiles) if tiles else replace(prepared, written=ids)

    def _next_turn(self, fields: Fields) -> Prepared:
        """Of a chat and the token ids of its answer: the beginning of the prompt that follows, for whatever is said."""
        kind, section = BodyKind(fields.integer("kind", 1, max(BodyKind)) or 0), fields.section("asked")
        assert section is not None, "the gateway puts it there"
        body = Fields(self._lines.left_out(section.raw()))
        chat = TRANSLATED[kind][0](body).body if kind in TRANSLATED else body.raw()
        asked = chat_request(Fields(chat))
        conversation, prompt, _ = self._render(asked)
        reading = conversation.reading(asked, prompt)
        skips = not conversation.shows_special(reading)
        message = answer_message(self._tokenizer, fields.integers("answer"), reading, skips=skips)
        _, text, _ = self._render(chat_request(Fields(followed(chat, message, kind))))
        ids = self._tokens.ids(unchanging(text), False, "messages")
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self._tokens.tokens_left(len(ids), 1, None, "messages")
        prepared = self._prepared([ids], params, asked, None)
        return replace(prepared, written=ids)

    def _translated(self, kind: BodyKind, fields: Fields) -> Prepared | bytes:
        """Another API's request. One that follows a response is answered by that one's id in JSON."""
        refuse_resume(fields)
        previous = fields.get("previous_response_id")
        if kind is BodyKind.RESPONSE and previous is not None:
            return json.dumps(fields.text("previous_response_id")).encode()
        translate, names = TRANSLATED[kind]
        with named(names):
            found = translate(fields)
        if found.whole:
            return found.whole
        names = {**names, **found.names}
        with named(names):
            try:
                prepared = self._asked(found, fields, names)
            except ContextLengthError as error:
                if kind is BodyKind.MESSAGE_COUNT:
                    return anthropic.count(error.tokens)
                if kind is BodyKind.MESSAGE:
                    raise anthropic.length_words(error, self._model.max_model_len) from error
                raise
        if kind is BodyKind.MESSAGE_COUNT:
            return anthropic.count(len(prepared.prompts[0]))
        kept = json.dumps(found.kept, separators=(",", ":")).encode() if found.kept else b""
        field = own_name(prepared.format_field, names)
        facts = {**found.facts, **_drawn_by(prepared, found)}
        return replace(prepared, facts=facts, kept=kept, format_field=field)

    def _asked(self, found: Translated, fields: Fields, names: Mapping[str, str]) -> Prepared:
        """What the other API's request comes to here; wishes have that API's names."""
        asked = Fields(found.body)
        if found.raw:
            self._check_sequences(prompt_count(asked), 1, "prompt")
            prepared = self._completion(completion_request(asked), None)
        else:
            prepared = self._chat(chat_request(asked))
        for name, instead in asked.passed.items():
            fields.pass_over(names.get(name, name), instead)
            if name in found.also:
                fields.pass_over(found.also[name], instead)
        return prepared

    def _prepared(
        self,
        prompts: Sequence["array[int]"],
        params: SamplingParams,
        asked: CompletionRequest | ChatRequest,
        echo: EchoText | None,
        reading: Reading | None = None,
        *,
        skips: bool = True,
        wanted: WantedGrammar | None = None,
    ) -> Prepared:
        self._tokens.check_named(params)
        self._tokens.check_routed(prompts, params)
        return Prepared(
            tuple(prompts),
            params,
            asked.logprobs,
            asked.options if asked.stream else None,
            GenerationBody(asked.sampling).skip_special_tokens and skips,
            echo,
            scheduling_of(asked.sampling),
            reading,
            resume=asked.resume,
            model=self._model.name,
            format_field="" if wanted is None else wanted.param,
            expected=self._expected(asked.sampling, params),
        )

    def _expected(self, fields: Fields, params: SamplingParams) -> "array[int]":
        """The tokens of an answer that is expected. Whoever drafts nothing passes them over."""
        words = expected_words(fields)
        drafts = self._model.drafts and params.draft != 0
        if words and not drafts:
            fields.pass_over(PREDICTION, "start the server with --draft, and leave draft out of the request")
        return self._tokens.expected(words) if words and drafts else array("i")

    def _tokenize(self, fields: Fields) -> bytes:
        """{"prompt"} or {"messages"} -> {"count", "max_model_len", "tokens"[, "token_strs"]}."""
        body = TokenizeBody(fields)
        text = body.prompt
        if text is None and body.messages is None:
            raise RequestError.about("prompt", "is missing; send a prompt or messages")
        special, spelled = body.add_special_tokens, body.return_token_strs
        if text is None:
            text, special = self._render(chat_request(fields))[1], False
        ids = self._tokens.ids(text, special, "prompt")
        reply: dict[str, object] = {"count": len(ids), "max_model_len": self._model.max_model_len}
        reply["tokens"] = ids.tolist()
        if spelled:
            reply["token_strs"] = [self._tokenizer.token(token_id) for token_id in ids]
        return json.dumps(reply).encode()

    def _about_tokenizer(self) -> bytes:
        if self._elsewhere:
            raise Elsewhere  # it has no template
        source = None if self._conversation is None else self._conversation.template_source
        return tokenizer_facts(self._tokenizer, self._model.max_model_len, source, self._model.changing_lines)

    def _detokenize(self, fields: Fields) -> bytes:
        """{"tokens"} -> {"prompt"}: the text, special tokens spelled out."""
        if fields.get("tokens") is None:
            fields.refuse_field("tokens", "an array of token ids")
        fields.entries("tokens", self._model.max_model_len)
        ids = fields.integers("tokens")
        self._tokens.check_quick()
        top = self._model.vocab_size
        for i, token_id in enumerate(ids):
            if not 0 <= token_id < top:
                raise RequestError(
                    f"tokens[{i}]: {shown(token_id)} is outside [0, {top - 1}]", param="tokens"
                )
        return json.dumps({"prompt": self._tokenizer.decode(ids, skip_special_tokens=False)}).encode()

    # ---- checks and steps

    def _check_sequences(self, prompts: int, choices: int | None, param: str = "n") -> None:
        n = choices or 1
        if prompts * n > self._model.max_sequences:
            raise RequestError.about(
                param,
                f"{prompts} prompts x n {n} = {prompts * n} sequences, at most {self._model.max_sequences}",
            )

    def _render(self, asked: ChatRequest) -> tuple[Conversation, str, Sequence[Picture]]:
        if self._elsewhere:
            raise Elsewhere
        if self._conversation is None:
            raise RequestError.about(
                "messages", "this model has no chat template; use /v1/completions with a prompt"
            )
        pictures = self._pictures.read_pictures(pictures_of(asked.messages))
        prompt = self._pictures.expand(self._conversation.render(asked), pictures)
        return self._conversation, prompt, pictures


def _drawn_by(prepared: Prepared, found: Translated) -> Mapping[str, object]:
    """The numbers that were used, where an answer repeats them."""
    params, tier = prepared.params, prepared.scheduling.tier
    used = {"temperature": params.temperature, "top_p": params.top_p, "service_tier": tier}
    return {name: value for name, value in used.items() if name in found.facts}


def check_template(template: ChatTemplate | None) -> None:
    """One short message through the template, so that one without an end is found at the start. It may refuse it."""
    if template is not None:
        try:
            template.render([{"role": "user", "content": "x"}])
        except RequestError:
            return
