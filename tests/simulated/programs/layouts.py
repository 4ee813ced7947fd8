"""layouts: the groups of six layouts of four ranks, of which two are trained in."""

from tests.simulated.programs.common import end, join_world, layout_of, model_in, table_of, train

join_world()
trained = layout_of(2, 2, 1), layout_of(1, 2, 2)
others = layout_of(4, 1, 1), layout_of(1, 4, 1), layout_of(1, 1, 4), layout_of(2, 1, 2)
table = table_of(*trained, *others)
for layout in trained:
    train(model_in(table.groups(layout)))
end()
