-- The last version of each deleted object, kept until the clock is a day past it,
-- so that the next object under the same key gets a greater version even if the
-- clock is set back.
CREATE TABLE IF NOT EXISTS {tombstones} (
    object_type      text   NOT NULL,
    id               text   NOT NULL,
    resource_version bigint NOT NULL,
    PRIMARY KEY (object_type, id)
) WITH (fillfactor = 50);
