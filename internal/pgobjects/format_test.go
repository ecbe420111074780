package pgobjects

import (
	"fmt"
	"regexp"
	"testing"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit/golden"
)

func TestTheTablesAndNotificationsOnPostgresStayAsTheyAre(t *testing.T) {
	got := Config{Table: "objects"}.DDL() + RowsDDL(objects.RowsConfig{
		Table: "jobs", ID: "id", Session: "session", Token: "token", Attempts: "attempts", NotBefore: "not_before", Ready: "status = 'queued'", OrderBy: "id",
	})
	got = regexp.MustCompile(`(?m)^--.*\n`).ReplaceAllString(got, "")
	public := &setup{}
	public.schemas[objects.TableOfObjects] = "public"
	id := objects.ID{Type: "lease", ID: "nightly"}
	golden.Compare(t, "postgres", got+fmt.Sprintf("NOTIFY %q, '%s';\n", channelOf("objects"), public.hint(id)))
}
