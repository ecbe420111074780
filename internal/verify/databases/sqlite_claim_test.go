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

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/verify/kit"
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
	alone, shared := tenure.SQLiteConfig{Logger: kit.Quiet}, tenure.SQLiteConfig{Shared: true, Logger: kit.Quiet}
	other := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	other.Env = append(os.Environ(), claimEnv+"="+path)
	out, err := other.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, other.Start())
	defer other.Wait()
	defer other.Process.Kill()
	line, _ := bufio.NewReader(out).ReadString('\n')
	require.Equal(t, "opened <nil>\n", line)

	db := kit.OpenSQL(t, "sqlite", "file:"+path)
	refused := func(err error) {
		t.Helper()
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, fmt.Sprintf("process %d uses this file", other.Process.Pid))
		require.ErrorContains(t, err, "set Shared in every program that uses it")
	}
	for _, cfg := range []tenure.SQLiteConfig{alone, shared} {
		_, err := tenure.OpenSQLite(t.Context(), path, cfg)
		refused(err)
		refused(kit.Must(tenure.NewSQLiteStore(db, cfg)).Migrate(t.Context()))
		store := kit.Must(tenure.NewSQLiteStore(db, cfg))
		ctx, cancel := context.WithCancel(t.Context())
		coordinator, err := tenure.NewCoordinator(kit.NewLease(t, store, tenure.LeaseConfig{}), tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { t.Error("the job runs in a second process"); cancel(); return nil },
		})
		require.NoError(t, err)
		go func() { kit.SleepFor(ctx, kit.Patience); cancel() }() // without its job, Run would go on as a standby
		refused(coordinator.Run(ctx))
		cancel()
	}
	elsewhere := alone
	elsewhere.Table = "others"
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
	_, err = tenure.OpenSQLite(t.Context(), path, alone)
	require.ErrorContains(t, err, "another process uses this file too")
	require.NoError(t, first.Close())
	require.NoError(t, second.Close())
	last := open(alone)
	require.NoError(t, last.Migrate(t.Context()), "by the process that has it")
	require.NoError(t, last.Close())
}
