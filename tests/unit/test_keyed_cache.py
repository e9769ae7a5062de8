"""`KeyedCache`: a value is returned for its own key only, and slots are independent."""

import pytest

from synkhronos._utils import KeyedCache


@pytest.mark.parametrize("key", [(1, [3]), (2, [2]), None, 1])
def test_a_value_is_returned_for_an_equal_key_and_nothing_for_another(key):
    cache = KeyedCache()
    assert cache.put("slot", (1, [2]), "value") == "value"
    assert cache.get("slot", key) is None
    assert cache.get("slot", (1, [2])) == "value"


def test_a_slot_holds_the_value_of_its_latest_key():
    cache = KeyedCache()
    cache.put("slot", 1, "first")
    cache.put("slot", 2, "second")
    assert (cache.get("slot", 1), cache.get("slot", 2), len(cache)) == (None, "second", 1)


def test_slots_have_values_of_their_own():
    cache = KeyedCache()
    cache.put("a", 1, "of a")
    cache.put("b", 1, "of b")
    assert (cache.get("a", 1), cache.get("b", 1), cache.get("c", 1)) == ("of a", "of b", None)


def test_the_oldest_slot_is_dropped_where_there_would_be_too_many():
    cache = KeyedCache(2)
    for slot in ("a", "b"):
        cache.put(slot, 1, slot)
    cache.put("a", 2, "new")
    assert (len(cache), cache.get("a", 2), cache.get("b", 1)) == (2, "new", "b")
    cache.put("c", 1, "c")
    assert (len(cache), cache.get("c", 1), cache.get("b", 1), cache.get("a", 2)) == (2, "c", "b", None)


def test_cleared_entries_keep_nothing_alive():
    cache = KeyedCache()
    cache.put("slot", 1, "value")
    cache.clear()
    assert (len(cache), cache.get("slot", 1)) == (0, None)
