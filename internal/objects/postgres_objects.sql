-- Half of each page stays free, so that a renewal finds room beside the row it
-- replaces and touches no index (a HOT update). That holds only while no index
-- mentions updated_at_ms or resource_version, not even a partial one.
CREATE TABLE IF NOT EXISTS {objects} (
    object_type      text   NOT NULL,
    id               text   NOT NULL,
    name             text,
    labels           jsonb,
    payload          bytea  NOT NULL,
    resource_version bigint NOT NULL,
    created_at_ms    bigint NOT NULL,
    updated_at_ms    bigint NOT NULL,
    PRIMARY KEY (object_type, id),
    UNIQUE (object_type, name)
) WITH (fillfactor = 50);
