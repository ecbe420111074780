package claims_test

import (
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// logged returns what Check logs.
func (db *rowsDB) logged(cfg claims.QueueConfig) string {
	var log testkit.SyncBuffer
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	require.NoError(db, testkit.Must(claims.NewQueue(db.open(), cfg)).Check(db.Context()))
	return log.String()
}

// documented returns the two statements of a section of docs/queues.md, on another table.
func (db *rowsDB) documented(section, from, to string) (first, second string) {
	page, err := os.ReadFile("../docs/queues.md")
	require.NoError(db, err)
	_, text, _ := strings.Cut(string(page), "\n## "+section+"\n")
	_, text, _ = strings.Cut(text, "```sql\n")
	text, _, _ = strings.Cut(text, "```")
	first, second, _ = strings.Cut(strings.ReplaceAll(text, from, to), ";")
	return first, second
}

// The operator finds out how many rows nobody takes, and frees them with the statements of docs/queues.md.
func TestCheckCountsRowsWhoseOwnersAreNoSessionsAndTheyCanBeAdopted(t *testing.T) {
	eachRowsServer(t, tasks, func(db *rowsDB) {
		a := db.worker(claims.SessionConfig{}, tasks)
		db.add(1, 6)
		require.Len(db, a.take(1), 1)
		db.endedSession("gone")
		require.NotContains(db, db.logged(tasks), "no sessions")
		db.exec(`UPDATE tasks SET session = 'worker-1' WHERE id IN (2, 3)`)
		db.exec(`UPDATE tasks SET session = 'worker-2' WHERE id = 4`)
		db.exec(`UPDATE tasks SET session = 'gone' WHERE id = 5`) // is freed by the sweep
		log := db.logged(tasks)
		require.Contains(db, log, "owners=2")
		require.Contains(db, log, "rows=3")

		list, free := db.documented("Moving a table", "mails", "tasks")
		owners := `SELECT count(*) FROM (` + list + `) AS owners WHERE session LIKE 'worker-%'`
		require.Equal(db, 2, db.count(owners))
		db.exec(free) // by name: under READ COMMITTED, NOT EXISTS would be judged by an older snapshot than a row that was just taken
		require.Equal(db, 0, db.count(owners))
		require.NotContains(db, db.logged(tasks), "no sessions")
		require.Len(db, testkit.Must(a.rows.OwnedBy(db.Context(), a.session.ID())), 1, "the session's own row is still claimed")
		got := a.take(9)
		require.Subset(db, takenIDs(got), []string{"2", "3", "4", "6"})
	})
}

func TestCheckNamesTheMissingIndexOfRowsThatAreDueLater(t *testing.T) {
	cfg := tasks
	eachRowsServer(t, cfg, func(db *rowsDB) {
		require.NotContains(db, db.logged(cfg), "due later")
		db.exec(`DROP INDEX tasks_due`)
		log := db.logged(cfg)
		require.Contains(db, log, "due later")
		ddl := strings.ReplaceAll(strings.ReplaceAll(log[strings.Index(log, "CREATE INDEX"):], `\"`, `"`), `\n`, "\n")
		db.exec(ddl[:strings.LastIndex(ddl, `"`)])
		require.NotContains(db, db.logged(cfg), "due later")
		byDue := cfg
		byDue.OrderBy = "not_before"
		db.exec(`DROP INDEX tasks_due`)
		require.NotContains(db, db.logged(byDue), "due later", "the order needs no other index")
	})
}
