-- The last version of each object that was deleted, for as long as the clock is
-- not a day past it: the next object under its key begins above it, even if the
-- clock is set back.
CREATE TABLE IF NOT EXISTS {tombstones} (
    object_type      text   NOT NULL,
    id               text   NOT NULL,
    resource_version bigint NOT NULL,
    PRIMARY KEY (object_type, id)
) WITH (fillfactor = 50);
