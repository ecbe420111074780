CREATE TABLE IF NOT EXISTS {objects} (
    object_type      TEXT    NOT NULL,
    id               TEXT    NOT NULL,
    name             TEXT,
    labels           TEXT,
    payload          BLOB    NOT NULL,
    resource_version INTEGER NOT NULL,
    created_at_ms    INTEGER NOT NULL,
    updated_at_ms    INTEGER NOT NULL,
    PRIMARY KEY (object_type, id),
    UNIQUE (object_type, name)
);
-- The last version of each object that was deleted, for as long as the clock is
-- not a day past it: the next object under its key begins above it, even if the
-- clock is set back.
CREATE TABLE IF NOT EXISTS {tombstones} (
    object_type      TEXT    NOT NULL,
    id               TEXT    NOT NULL,
    resource_version INTEGER NOT NULL,
    PRIMARY KEY (object_type, id)
);
CREATE INDEX IF NOT EXISTS {tombstones_by_age} ON {tombstones} (resource_version);
