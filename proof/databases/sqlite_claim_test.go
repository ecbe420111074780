//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package databases_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// claimEnv tells a process of this test to open that file as if it were alone.
const claimEnv = "TENURE_TEST_CLAIM"

func TestASQLiteFileIsRefusedToASecondProcessUnlessBothShareIt(t *testing.T) {
	if path := os.Getenv(claimEnv); path != "" {
		_, err := tenure.OpenSQLite(t.Context(), path, tenure.SQLiteConfig{})
		fmt.Println("opened", err)
		select {}
	}
	path := filepath.Join(t.TempDir(), "tenure.db")
	alone, shared := tenure.SQLiteConfig{Logger: testkit.Quiet}, tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet}
	other := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	other.Env = append(os.Environ(), claimEnv+"="+path)
	out, err := other.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, other.Start())
	defer other.Wait()
	defer other.Process.Kill()
	line, _ := bufio.NewReader(out).ReadString('\n')
	require.Equal(t, "opened <nil>\n", line)

	db := testkit.OpenSQL(t, "sqlite", "file:"+path)
	refused := func(err error) {
		t.Helper()
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, fmt.Sprintf("the file is in use: process %d has it open", other.Process.Pid))
		require.ErrorContains(t, err, "set Shared in all programs that use it, or add ?shared=true")
	}
	_, err = tenure.OpenSQLite(t.Context(), path, alone)
	refused(err)
	for _, cfg := range []tenure.SQLiteConfig{alone, shared} {
		refused(testkit.Must(tenure.NewSQLiteStore(db, cfg)).Migrate(t.Context()))
		store := testkit.Must(tenure.NewSQLiteStore(db, cfg))
		lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
		ctx, cancel := context.WithCancel(t.Context())
		coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { t.Error("the job runs in a second process"); cancel(); return nil },
		})
		require.NoError(t, err)
		go func() { testkit.Sleep(ctx, testkit.Patience); cancel() }() // without its job, Run would go on as a standby
		refused(coordinator.Run(ctx))
		cancel()
	}
	reader, err := tenure.OpenSQLite(t.Context(), path, shared)
	require.NoError(t, err, "to look who holds it")
	_, err = testkit.NewLease(t, reader, tenure.LeaseConfig{}).Read(t.Context())
	require.NotErrorIs(t, err, tenure.ErrInvalid)
	_, err = testkit.NewLease(t, reader, tenure.LeaseConfig{}).TryAcquire(t.Context())
	refused(err)
	require.NoError(t, reader.Close())
	sameTable, elsewhere := alone, alone
	sameTable.Table, elsewhere.Table = "Objects", "others"
	_, err = tenure.OpenSQLite(t.Context(), path, sameTable)
	refused(err)
	store, err := tenure.OpenSQLite(t.Context(), path, elsewhere)
	require.NoError(t, err, "another table")
	require.NoError(t, store.Close())

	require.NoError(t, other.Process.Kill())
	other.Wait()
	open := func(cfg tenure.SQLiteConfig) *tenure.SQLiteStore {
		t.Helper()
		store, err := tenure.OpenSQLite(t.Context(), path, cfg)
		require.NoError(t, err)
		return store
	}
	first, second := open(shared), open(shared)
	require.NoError(t, first.Migrate(t.Context()))
	require.NoError(t, second.Migrate(t.Context()))
	_, err = tenure.OpenSQLite(t.Context(), path, alone)
	require.ErrorContains(t, err, fmt.Sprintf("process %d has it open too", os.Getpid()))
	require.NoError(t, first.Close())
	require.NoError(t, second.Close())
	last := open(alone)
	require.NoError(t, last.Migrate(t.Context()), "by the process that has it")
	require.NoError(t, last.Close())
}

func TestAFileIsClaimedUntilTheJobHasReturnedAndAgainByTheNextRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tenure.db")
	alone := tenure.SQLiteConfig{Logger: testkit.Quiet}
	store := testkit.Must(tenure.NewSQLiteStore(testkit.OpenSQL(t, "sqlite", "file:"+path), alone))
	refused := func(when string) {
		t.Helper()
		_, err := tenure.OpenSQLite(t.Context(), path, alone)
		require.ErrorIs(t, err, tenure.ErrSetup, when)
	}
	for range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		working, told, mayReturn := make(chan struct{}), make(chan struct{}), make(chan struct{})
		coordinator, err := tenure.NewCoordinator(testkit.NewLease(t, store, tenure.LeaseConfig{}), tenure.CoordinatorConfig{
			Reconcile: func(ctx context.Context) error {
				close(working)
				<-ctx.Done()
				close(told)
				<-mayReturn
				return nil
			},
		})
		require.NoError(t, err)
		returned := make(chan error)
		go func() { returned <- coordinator.Run(ctx) }()
		<-working
		refused("while the job works")
		cancel()
		<-told
		require.NoError(t, store.Close())
		refused("while the job returns")
		close(mayReturn)
		require.NoError(t, <-returned)
		next, err := tenure.OpenSQLite(t.Context(), path, alone)
		require.NoError(t, err)
		require.NoError(t, next.Close())
	}
}

func TestRunWaitsForADatabaseThatIsLockedWhenItStarts(t *testing.T) {
	for _, shared := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "tenure.db")
		locker := testkit.OpenSQL(t, "sqlite", "file:"+path+"?_txlock=exclusive")
		testkit.ExecSQL(t, locker, `CREATE TABLE t (x)`)
		tx, err := locker.Begin()
		require.NoError(t, err)
		store := testkit.Must(tenure.NewSQLiteStore(testkit.OpenSQL(t, "sqlite", "file:"+path+"?_pragma=journal_mode(WAL)"), tenure.SQLiteConfig{Shared: shared, Logger: testkit.Quiet}))
		ctx, cancel := context.WithCancel(t.Context())
		coordinator, err := tenure.NewCoordinator(testkit.NewLease(t, store, tenure.LeaseConfig{TTL: 2 * time.Second}), tenure.CoordinatorConfig{})
		require.NoError(t, err)
		returned := make(chan error)
		go func() { returned <- coordinator.Run(ctx) }()
		testkit.Await(t, "the error is seen", func() bool { return coordinator.Status().LastError != "" })
		require.NoError(t, tx.Rollback())
		if !shared {
			testkit.Await(t, "the job runs", coordinator.IsHolder)
		}
		cancel()
		require.NoError(t, <-returned)
		require.NoError(t, store.Close())
	}
}
