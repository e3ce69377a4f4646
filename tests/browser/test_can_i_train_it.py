"""The page of what fits where, in a real browser: as a visitor asks it, by pointer and by keyboard, light and dark."""

import importlib
import json

import pytest
from pages import PICTURES

GiB = 2**30
ROW = {"model": "llama3.1-8b", "way": "adapters over four bits", "chip": "t4", "tokens": 8192, "batch": 1, "fits": True}
ROW |= {"peak_bytes": 12 * GiB, "host_bytes": 0, "seconds": 20.0, "plan": "Plan(remat='attn')", "as_tiled": False}
ROW |= {"by": "jax 0.10.1, XLA", "why": "", "day": "2026-11-27"}
ROWS = [
    ROW,
    {**ROW, "chip": "v5e-1", "seconds": 4.0, "host_bytes": 3 * GiB, "plan": "Plan(offload=('block_in',))"},
    {**ROW, "tokens": 32_768, "fits": False, "why": "nothing fits: too long"},
    {**ROW, "chip": "v5e-4", "way": "all parameters", "batch": 4, "seconds": 8.0, "peak_bytes": int(15.3 * GiB)},
    {**ROW, "chip": "t4", "way": "all parameters", "fits": False, "why": "nothing fits: <b>too</b> large"},
    {**ROW, "model": "qwen3-0.6b", "way": "all parameters", "tokens": 131_072},
]


@pytest.fixture(params=["light", "dark"])
def page(browser, request, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    file = tmp_path / "page.html"
    file.write_text(importlib.import_module("build").fits_page(rows), encoding="utf-8")
    opened = browser.new_page(viewport={"width": 900, "height": 700}, color_scheme=request.param)
    told: list[str] = []
    opened.on("console", lambda message: told.append(message.text))
    opened.on("pageerror", lambda error: told.append(str(error)))
    opened.on("request", lambda asked: None if asked.url.startswith("file:") else told.append(asked.url))
    opened.goto(f"{file.as_uri()}#way=adapters over four bits")
    yield opened
    opened.screenshot(path=PICTURES / f"can_i_train_it_{request.param}.png")
    assert told == []
    opened.close()


def test_a_visitor_asks_and_sees_what_holds_it(page):
    said, rows = page.locator("#said"), page.locator("#rows > li")
    assert said.inner_text() == (
        "llama3.1-8b, QLoRA (4-bit), 8,192 tokens: 1 of 2 chips hold it, and the smallest is T4. "
        "1 more would with more of the host's memory."
    )
    assert "12.0 of 14.6 GiB\n410 tokens/s, 678 h for a billion tokens" in rows.nth(0).inner_text()
    assert "12.0 of 15.8 GiB, only with 3.0 GiB of the host's memory\n2,050 tokens/s" in rows.nth(1).inner_text()
    page.locator("[name=host]").select_option("16")
    assert "2 of 2 chips hold it" in said.inner_text()
    page.locator("[name=price]").fill("2.5")
    assert "678 h for a billion tokens, 1,700 at your price" in rows.nth(0).inner_text()
    # By keyboard: the row tells its plan and its command, and closes again.
    rows.nth(1).locator("button").focus()
    page.keyboard.press("Enter")
    told = rows.nth(1).inner_text()
    command = "llamem plan llama3.1-8b --chip v5e-1 --tokens 8192 --lora 16 --quantize q4_0 --host-gib 3"
    assert command in told and "llamem.Plan(offload=('block_in',))" in told
    assert "ompiled on 2026-11-27 by jax 0.10.1, XLA." in told
    page.keyboard.press("Enter")
    assert "block_in" not in rows.nth(1).inner_text()


def test_one_chip_is_shown_at_every_length(page):
    said, rows = page.locator("#said"), page.locator("#rows > li")
    page.locator("[name=chip]").select_option("t4")
    assert said.inner_text() == (
        "llama3.1-8b, QLoRA (4-bit), 8,192 tokens on T4: yes, 12.0 of 14.6 GiB. 410 tokens/s, "
        "678 h for a billion tokens. The longest below that fits has 8,192 tokens."
    )
    assert rows.count() == 2 and "32,768 tokens" in rows.nth(1).inner_text() and "no" in rows.nth(1).inner_text()
    page.locator("[name=tokens]").select_option("32768")
    assert "on T4: no. The longest" in said.inner_text()
    page.locator("[name=chip]").select_option("v5e-4")
    assert said.inner_text() == "llama3.1-8b, QLoRA (4-bit), was asked only of T4, TPU v5e." and rows.count() == 0
    page.locator("[name=model]").select_option("qwen3-0.6b")
    page.locator("[name=tokens]").select_option("131072")
    assert said.inner_text() == "no: qwen3-0.6b reads at most 40,960 tokens."


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("8B QLoRA on a free T4 at 8k?", "llama3.1-8b, QLoRA (4-bit), 8,192 tokens on T4: yes, 12.0 of 14.6 GiB."),
        ("Llama 8B full fine-tune with 8,192 tokens on a v5e-4, $2", "on TPU v5e-4 (4 chips): yes, 15.3 of 15.8 GiB"),
        ("all of 8B on a T4", "llama3.1-8b, all parameters, 8,192 tokens on T4: no."),
        ("QLoRA of 8B on a v5e, 32 GB of RAM", "yes with 3.0 GiB of the host's memory: 12.0 of 15.8 GiB."),
        ("QLoRA of 8B on a v5e", "no, but yes with 3.0 GiB of the host's memory"),
        ("Qwen3 0.6B QLoRA, 128k", "no: qwen3-0.6b reads at most"),
        ("mistral 7b qlora on 2 x t4, 16k", "Nothing here about: mistral, 7b, 2, x, 16k. The rest: llama3.1-8b, QLoRA"),
    ],
)
def test_a_question_in_words_chooses(page, question, said):
    page.locator("#ask").fill("8B LoRA on a v5e at 32k with 64 GB of RAM, $9")  # leaves nothing to the next question
    page.locator("#ask").fill(question)
    assert said in page.locator("#said").inner_text()
    assert page.locator("[name=price]").input_value() == ("2" if "$2" in question else "")


def test_the_address_keeps_the_choice_and_a_slice_counts_whole(page):
    page.locator("[name=way]").select_option("all parameters")
    page.locator("[name=price]").fill("1")
    page.reload()
    rows = page.locator("#rows > li")
    assert page.locator("[name=way]").input_value() == "all parameters" and rows.count() == 2
    # Four sequences in 8 s: 4,096 tokens a second, 67.8 hours of four chips. Of its 15.75 GiB 15.3 are 97 %.
    assert "4 chips" in rows.nth(0).inner_text()
    told = "15.3 of 15.8 GiB per chip, tight\n4,100 tokens/s, 67.8 h for a billion tokens, 271 at your price"
    assert told in rows.nth(0).inner_text()
    rows.nth(1).locator("button").click()
    assert "nothing fits: <b>too</b> large" in rows.nth(1).inner_text()
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
