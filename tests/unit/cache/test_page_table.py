"""req_to_token: the slot of every position, read through the worker's tensor."""

from __future__ import annotations

import torch

from eagle_server.cache.page_table import PageTable


def test_pages_map_to_consecutive_slots_and_a_tensor_view_shows_them() -> None:
    table = PageTable(2, 10, 4)
    view = torch.from_numpy(table.slots)
    row = table.take_row()
    table.assign(row, 0, [3, 1])
    table.assign(row, 2, [5])
    assert view[row].tolist() == [12, 13, 14, 15, 4, 5, 6, 7, 20, 21, 22, 23]  # the width is whole pages


def test_rows_are_taken_once_and_come_back_empty() -> None:
    table = PageTable(3, 4, 1)
    rows = [table.take_row() for _ in range(3)]
    assert sorted(rows) == [0, 1, 2]
    assert table.free_rows == 0
    table.assign(rows[1], 0, [7, 8])
    table.release_row(rows[1])
    assert table.free_rows == 1
    assert table.take_row() == rows[1]
    assert table.slots[rows[1]].tolist() == [0, 0, 0, 0]


def test_changes_since_the_last_call_bring_a_copy_up_to_date() -> None:
    table = PageTable(3, 12, 2, shared=True)
    copy = table.slots.copy()
    rows = [table.take_row() for _ in range(3)]
    assert table.refresh() is None
    table.assign(rows[0], 0, [3, 1])
    table.assign(rows[2], 0, [7])
    table.assign(rows[1], 0, [8, 9])
    table.assign(rows[0], 2, [5])
    table.release_row(rows[2])
    row, position, slot = table.refresh()
    copy[row, position] = slot
    assert (copy[rows[:2]] == table.slots[rows[:2]]).all()
    assert len({*zip(row.tolist(), position.tolist(), strict=True)}) == len(row) == 10
    assert rows[2] not in row
    assert table.refresh() is None
