"""JSON schema mode with speculation: is every output valid, and how many tokens per round?

Schemas of many kinds are made from a seed: nested objects, arrays, enums, patterns, formats,
bounded numbers, optional fields, alternatives, references. Each asks the default model for an
object in a chat of its own, half of them greedily; ``jsonschema`` judges the answers. For
comparison the same requests run once more without drafts.

    python -m bench.json_schemas --schemas 100
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import jsonschema
from tqdm import tqdm

from bench.common import Figure, engine_settings, report, write_results
from specdec.chat import encode_prompt
from specdec.config import DEFAULT_MODEL
from specdec.engine import Engine
from specdec.params import GrammarSpec, SamplingParams

#: Enough for the largest of these schemas, so that none is cut short.
MAX_TOKENS = 1000

_WORDS = (
    "name", "title", "city", "country", "author", "colour", "status", "category", "email",
    "description", "street", "brand", "language", "team", "genre", "summary", "role", "animal",
)  # fmt: skip
_COUNTS = ("age", "year", "price", "rating", "quantity", "score", "height", "weight", "pages")
_ENUMS = (
    ("red", "green", "blue"),
    ("low", "medium", "high"),
    ("draft", "published", "archived"),
    ("north", "south", "east", "west"),
)
_PATTERNS = (
    "^[A-Z]{2}[0-9]{4}$",
    "^[a-z]{1,12}(-[a-z]{1,12}){0,2}$",
    "^\\+[0-9]{6,12}$",
    "^#[0-9a-f]{6}$",
    "^(Mr|Ms|Dr)\\. [A-Z][a-z]{1,10}$",
)
#: Not ``date``: to llguidance the 31st of February is one. Nor anything else in these schemas that
#: has no end, as the fraction of a number or of a second: a small model may go on for ever.
_FORMATS = ("uuid", "ipv4")
_TOPICS = ("a book", "a person", "a film", "a product", "a town", "a recipe", "a sports team")


@dataclass(frozen=True)
class Outcome:
    """What became of one schema.

    Attributes:
        schema: asked for.
        text: of the answer.
        fault: why it is not valid; None if it is.
        rounds: of verification.
        committed: tokens that these gave.
    """

    schema: Mapping[str, object]
    text: str
    fault: str | None
    rounds: int
    committed: int

    @property
    def tokens_per_round(self) -> float:
        """Of an answer of a single token 1: it had no round."""
        return self.committed / self.rounds if self.rounds else 1.0


def make_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object with some properties, most of them required."""
    names = rng.sample(_WORDS, rng.randrange(1, 5)) + rng.sample(_COUNTS, rng.randrange(0, 3))
    rng.shuffle(names)
    properties = {name: _number(rng) if name in _COUNTS else _value(rng, depth) for name in names}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": [name for name in names if rng.random() < 0.8] or names[:1],
        "additionalProperties": False,
    }
    if depth == 2 and rng.random() < 0.3:
        schema["$defs"] = {"entry": make_schema(rng, 0)}
        schema["properties"]["entries"] = {
            "type": "array",
            "items": {"$ref": "#/$defs/entry"},
            "minItems": 1,
            "maxItems": 3,
        }
        schema["required"].append("entries")
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["text", "text", "enum", "pattern", "format", "boolean", "either", "const"]
    kind = rng.choice(kinds + (["object", "array", "array"] if depth else []))
    if kind == "text":
        return {"type": "string", "minLength": rng.randrange(4), "maxLength": rng.randrange(8, 60)}
    if kind == "enum":
        return {"enum": list(rng.choice(_ENUMS))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": rng.choice(_FORMATS)}
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "const":
        return {"const": rng.choice(_WORDS)}
    if kind == "either":
        return {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 20}, _number(rng)]}
    if kind == "object":
        return make_schema(rng, depth - 1)
    least = rng.randrange(3)
    items = rng.choice((_value, lambda r, _: _number(r)))(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    high = low + rng.choice((3, 20, 1000))
    if rng.random() < 0.3:
        return {"type": "integer", "minimum": low, "maximum": high + 10, "multipleOf": 5}
    return {"type": "integer", rng.choice(("minimum", "exclusiveMinimum")): low, "maximum": high}


def make_schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` different ones."""
    rng = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        schema = make_schema(rng)
        found[json.dumps(schema)] = schema
    return list(found.values())


def run(engine: Engine, schemas: Sequence[Mapping[str, Any]], speculation: bool) -> list[Outcome]:
    """Ask for an object of each schema, all in one continuously batched run."""
    for number, schema in enumerate(schemas):
        question = f"Write a JSON object that describes {_TOPICS[number % len(_TOPICS)]}."
        spec = GrammarSpec("json_schema", json.dumps(schema))
        params = SamplingParams(
            max_tokens=MAX_TOKENS, grammar=spec, seed=number, speculation=speculation
        )
        if number % 2:
            params = replace(params, temperature=0.8, top_p=0.95)
        prompt = encode_prompt(engine.tokenizer, [{"role": "user", "content": question}])
        engine.add_request(str(number), prompt, params)
    tokens: list[list[int]] = [[] for _ in schemas]
    outcomes: dict[int, Outcome] = {}
    with tqdm(total=len(schemas), unit="answer") as progress:
        while engine.has_work:
            for output in engine.step():
                number = int(output.request_id)
                tokens[number].extend(output.new_tokens)
                if output.stats is None:
                    continue
                progress.update()
                text = engine.tokenizer.decode(tokens[number], skip_special_tokens=True)
                fault = output.error or judge(str(text), schemas[number])
                stats = output.stats
                outcomes[number] = Outcome(
                    schemas[number], str(text), fault, stats.rounds, stats.accepted + stats.rounds
                )
    engine.check_integrity()
    return [outcomes[number] for number in range(len(schemas))]


def judge(text: str, schema: Mapping[str, Any]) -> str | None:
    """Why a text is not of a schema; None if it is."""
    try:
        value = json.loads(text)
        jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
            value
        )
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def main() -> int:
    """Command line. Status 1 if an answer is not valid, or differs from the one without drafts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--budget",
        default="unlimited",
        choices=("unlimited", "measured"),
        help="how many candidates are verified: all, which makes tokens per round comparable, or "
        "those that pay on this machine",
    )
    parser.add_argument("--name", default="json_schemas", help="of the file of results")
    options = parser.parse_args()
    values = {
        "model": DEFAULT_MODEL,
        "dtype": options.dtype,
        "batch": {"max_sequences": 8},
        "speculation": {"budget": options.budget},
    }
    engine = Engine.from_settings(engine_settings(values))
    schemas = make_schemas(options.schemas, options.seed)
    speculative = run(engine, schemas, speculation=True)
    plain = run(engine, schemas, speculation=False)
    figures = {
        "valid_share": Figure(mean(one.fault is None for one in speculative), 1.0),
        "same_as_plain_share": Figure(
            mean(a.text == b.text for a, b in zip(speculative, plain, strict=True)), 1.0
        ),
        "tokens_per_round": Figure(
            sum(one.committed for one in speculative) / sum(one.rounds for one in speculative), 1.5
        ),
        "tokens_per_round_worst_schema": Figure(
            min(one.tokens_per_round for one in speculative), 1.05
        ),
    }
    for one in speculative:
        if one.fault is not None:
            print(f"{one.fault}\n  {json.dumps(one.schema)}\n  {one.text}")
    answers = [
        {"text": one.text, "fault": one.fault, "tokens_per_round": one.tokens_per_round}
        for one in speculative
    ]
    print(report(figures))
    print("wrote", write_results(options.name, figures, {"answers": answers}))
    return 0 if all(figure.met for figure in figures.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
