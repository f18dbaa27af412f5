"""Words per minute: tokens per second times sixty over the tokens per word."""

import pytest

from llmcli.reading_speed import READING_PACES, SAMPLE_TEXT, SAMPLE_WORDS, ReadingPace, measure_pace


def test_a_rate_in_words_a_minute_and_back():
    found = ReadingPace(1.5)
    assert found.words_per_minute(10) == pytest.approx(400)
    assert found.tokens_per_second(400) == pytest.approx(10)
    for words in READING_PACES.values():
        assert found.words_per_minute(found.tokens_per_second(words)) == pytest.approx(words)


def test_the_line_says_how_many_times_as_fast_as_people_the_slowest_is():
    found = ReadingPace(1.2)
    assert found.format_line([100.0]) == (
        "100.0 tok/s are 5,000 words a minute (1.20 tokens a word): 20 × silent reading, 11 × listening, 7.1 × skimming"
    )
    assert found.format_line([4.0, 2.5]).startswith(
        "2.5 to 4.0 tok/s are 125 to 200 words a minute"
    )
    assert "at least 0.50 × silent reading" in found.format_line([4.0, 2.5])


def test_the_document_has_every_pace():
    told = ReadingPace(1.2).build_document(5.0)
    assert told == {
        "tokens_per_word": 1.2,
        "words_per_minute": 250.0,
        "times": {"silent_reading": 1.0, "listening": 0.556, "skimming": 0.357},
    }


def test_tokens_are_counted_over_the_text():
    assert len(SAMPLE_TEXT.split()) == SAMPLE_WORDS == 300
    assert measure_pace(lambda text: [0] * (2 * len(text.split()))) == ReadingPace(2.0)
    assert measure_pace(lambda text: []) is None


@pytest.mark.model
def test_a_trained_vocabulary_takes_little_more_than_a_token_a_word(smollm2, gemma3):
    from llmcli.runtime.binding.model import open_model

    for path in (smollm2, gemma3):
        with open_model(path, vocab_only=True) as model:
            found = measure_pace(lambda text: model.tokenize(text, special=False))
        assert found
        assert 1.1 < found.tokens_per_word < 1.4
