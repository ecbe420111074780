package claims_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A trigger raises an error with a code of its own when one row is freed, by its session and by the
// one that frees the rows of a session that is gone.
func TestATriggerWithACodeOfItsOwnHoldsUpNoOtherRow(t *testing.T) {
	db := rowsOnPostgres(t)
	db.exec(`CREATE TABLE tasks (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'queued', priority integer NOT NULL DEFAULT 0, result text)`)
	db.exec(testkit.Must(tasks.PostgresDDL()))
	db.exec(`CREATE FUNCTION never() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN IF NEW.id = 2 AND NEW.session IS NULL THEN RAISE EXCEPTION 'never' USING ERRCODE = 'TN001'; END IF; RETURN NEW; END $$`)
	db.exec(`CREATE TRIGGER never BEFORE UPDATE ON tasks FOR EACH ROW EXECUTE FUNCTION never()`)
	db.add(1, 40)
	a := db.worker(claims.SessionConfig{TTL: 3 * time.Second}, tasks)
	got := a.take(40)
	require.Len(t, got, 40)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	require.NoError(t, a.rows.Release(ctx, got...))
	require.Equal(t, 1, db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`))
	a.stop() // does not wait for the row

	db.endedSession("gone")
	db.exec(`UPDATE tasks SET session = 'gone', token = token + 1`)
	db.worker(claims.SessionConfig{TTL: 3 * time.Second}, tasks)
	testkit.Await(t, "the others are free", func() bool { return db.count(`SELECT count(*) FROM tasks WHERE session IS NOT NULL`) == 1 })
}
