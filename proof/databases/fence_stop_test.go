//go:build unix

package databases_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

const pausedTTL = 2 * time.Second

// The holder that is stopped in the middle of fn is a process of its own: this test again,
// with the URL in its environment.
func TestAHolderThatIsStoppedWithinFnDelaysNoTakeover(t *testing.T) {
	testkit.Slow(t)
	const urlVar = "TENURE_TEST_STOPPED_HOLDER"
	if url := os.Getenv(urlVar); url != "" {
		stoppedHolder(t, url)
		return
	}
	url := testkit.PostgresURL(t)
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	testkit.Migrate(t, store)
	pool := testkit.PostgresPool(t, url)
	testkit.ExecPostgres(t, pool, `CREATE TABLE ledger (note text)`)

	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	child.Env = append(os.Environ(), urlVar+"="+url)
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	goOn, err := child.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	defer child.Process.Kill()
	lines := bufio.NewScanner(out)
	await := func(want string) string {
		t.Helper()
		for lines.Scan() {
			if strings.HasPrefix(lines.Text(), want) {
				return lines.Text()
			}
		}
		t.Fatalf("the holder ended without saying %q", want)
		return ""
	}
	await("in fn")
	stopped := time.Now()
	require.NoError(t, child.Process.Signal(syscall.SIGSTOP))

	// The stopped transaction stays open, until the server ends it after a minute.
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	standby := testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "standby", TTL: pausedTTL})
	var term *tenure.Term
	for term == nil {
		term, err = standby.AcquireOrSteal(ctx)
		if err != nil && !errors.Is(err, tenure.ErrHeld) && !errors.Is(err, tenure.ErrDeadline) {
			t.Fatal(err)
		}
	}
	t.Logf("taken over %v after the stop, with a TTL of %v", time.Since(stopped), pausedTTL)

	require.NoError(t, child.Process.Signal(syscall.SIGCONT))
	fmt.Fprintln(goOn, "go on")
	got := await("fenced:")
	require.Contains(t, got, tenure.ErrLost.Error())
	require.Contains(t, got, "standby")
	require.NoError(t, child.Wait())
	var rows int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM ledger`).Scan(&rows))
	require.Zero(t, rows)
}

func stoppedHolder(t *testing.T, url string) {
	ctx := context.Background()
	store := testkit.OpenPostgres(t, url, tenure.PostgresConfig{})
	term := testkit.MustAcquire(t, testkit.NewLease(t, store, tenure.LeaseConfig{Holder: "stopped", TTL: pausedTTL}))
	err := store.Fenced(ctx, term, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO ledger VALUES ('stale')`); err != nil {
			return err
		}
		fmt.Println("in fn")
		_, err := bufio.NewReader(os.Stdin).ReadString('\n')
		return err
	})
	fmt.Println("fenced:", err)
}
