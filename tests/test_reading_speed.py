"""llmcli/reading_speed.py: words per minute are 60 times tokens per second / tokens per word."""

import pytest

from llmcli.reading_speed import READING_PACES, SAMPLE_TEXT, SAMPLE_WORDS, ReadingPace, measure_pace


def test_words_per_minute_and_tokens_per_second_are_inverse():
    pace = ReadingPace(1.5)
    assert pace.words_per_minute(10) == pytest.approx(400)
    assert pace.tokens_per_second(400) == pytest.approx(10)
    for words in READING_PACES.values():
        assert pace.words_per_minute(pace.tokens_per_second(words)) == pytest.approx(words)


def test_the_line_compares_the_slowest_speed_with_reading():
    pace = ReadingPace(1.2)
    assert pace.format_line([100.0]) == (
        "100.0 tok/s are 5,000 words a minute (1.20 tokens a word): 20 × silent reading, 11 × listening, 7.1 × skimming"
    )
    assert pace.format_line([4.0, 2.5]).startswith("2.5 to 4.0 tok/s are 125 to 200 words a minute")
    assert "at least 0.50 × silent reading" in pace.format_line([4.0, 2.5])


def test_the_document_has_every_pace():
    document = ReadingPace(1.2).build_document(5.0)
    assert document == {
        "tokens_per_word": 1.2,
        "words_per_minute": 250.0,
        "times": {"silent_reading": 1.0, "listening": 0.556, "skimming": 0.357},
    }


def test_tokens_per_word_are_measured_on_the_sample_text():
    assert len(SAMPLE_TEXT.split()) == SAMPLE_WORDS == 300
    assert measure_pace(lambda text: [0] * (2 * len(text.split()))) == ReadingPace(2.0)
    assert measure_pace(lambda text: []) is None


@pytest.mark.model
def test_trained_vocabularies_have_1_1_to_1_4_tokens_per_word(smollm2, gemma3):
    from llmcli.runtime.binding.model import open_model

    for path in (smollm2, gemma3):
        with open_model(path, vocab_only=True) as model:
            pace = measure_pace(lambda text: model.tokenize(text, special=False))
        assert pace
        assert 1.1 < pace.tokens_per_word < 1.4
