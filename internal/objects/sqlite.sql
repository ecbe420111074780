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
-- The last version of each deleted object, kept until the clock is a day past it,
-- so that the next object under the same key gets a greater version even if the
-- clock is set back.
CREATE TABLE IF NOT EXISTS {tombstones} (
    object_type      TEXT    NOT NULL,
    id               TEXT    NOT NULL,
    resource_version INTEGER NOT NULL,
    PRIMARY KEY (object_type, id)
);
CREATE INDEX IF NOT EXISTS {tombstones_by_age} ON {tombstones_table} (resource_version);
