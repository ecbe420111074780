package sqliteobjects

import (
	"regexp"
	"testing"

	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit/golden"
)

func TestTheTablesOnSQLiteStayAsTheyAre(t *testing.T) {
	got := DDL("objects") + RowsDDL(objects.RowsConfig{
		Table: "jobs", ID: "id", Session: "session", Token: "token", Attempts: "attempts", NotBefore: "not_before", Ready: "status = 'queued'", OrderBy: "id",
	})
	golden.Compare(t, "sqlite", regexp.MustCompile(`(?m)^--.*\n`).ReplaceAllString(got, ""))
}
