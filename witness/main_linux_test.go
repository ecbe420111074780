package witness_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5/pgxpool"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/witness"
)

// The processes of these tests are this test program again, with a role.
const roleEnv = "WITNESS_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(play(role))
	}
	testkit.Main(m)
}

func openTestStore(ctx context.Context) (tenure.Store, error) {
	url := os.Getenv("WITNESS_TEST_STORE")
	if strings.HasPrefix(url, "postgres") {
		return tenure.OpenPostgres(ctx, url, tenure.PostgresConfig{Logger: testkit.Quiet})
	}
	return tenure.OpenSQLite(ctx, url, tenure.SQLiteConfig{Shared: true, Logger: testkit.Quiet})
}

// play plays a role, and returns the exit status.
func play(role string) int {
	switch role {
	case "main":
		witness.Main(openTestStore)
		return hold()
	case "too long": // so that Main cannot start a child
		os.Setenv("WITNESS_TEST_LONG", strings.Repeat("x", 1<<20))
		witness.Main(openTestStore)
		const getChildSubreaper = 37
		var reaper int32
		syscall.Syscall(syscall.SYS_PRCTL, getChildSubreaper, uintptr(unsafe.Pointer(&reaper)), 0)
		fmt.Println("alone", reaper)
		select {}
	case "terminal": // a shell, which runs a witness and then reads from the terminal
		os.Setenv(roleEnv, "witness")
		os.Setenv("WITNESS_TEST_PROGRAM", "sh")
		shell := exec.Command("/proc/self/exe", `read line; echo "$line"`)
		shell.Stdin, shell.Stdout, shell.Stderr = os.Stdin, os.Stdout, os.Stderr
		fmt.Println("ended", shell.Run())
		var line string
		_, err := fmt.Scanln(&line)
		fmt.Println(line, err)
	case "witness":
		os.Setenv(roleEnv, os.Getenv("WITNESS_TEST_PROGRAM"))
		timeout, _ := time.ParseDuration(os.Getenv("WITNESS_TEST_STOP_TIMEOUT"))
		status, err := witness.Run(witness.Config{Open: openTestStore, Young: -1, StopTimeout: timeout, NoDrain: os.Getenv("WITNESS_TEST_NO_DRAIN") != ""}, append([]string{"/proc/self/exe"}, os.Args[1:]...)...)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 99
		}
		return status
	case "sidecar":
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if err := witness.Listen(ctx, witness.Config{Open: openTestStore, Young: -1}, os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 99
		}
		return 0
	case "sh":
		syscall.Exec("/bin/sh", append([]string{"sh", "-c"}, os.Args[1:]...), os.Environ())
	case "hold":
		return hold()
	case "execs": // after a SIGUSR1
		execs := make(chan os.Signal, 1)
		signal.Notify(execs, syscall.SIGUSR1)
		go func() {
			<-execs
			os.Setenv(roleEnv, "sh")
			syscall.Exec("/proc/self/exe", []string{"program", "exec sleep 1000"}, os.Environ())
		}()
		return hold()
	case "closes":
		return hold(func() {
			for fd := 3; fd < 100; fd++ { // a stray close, of everything
				var stat syscall.Stat_t
				if syscall.Fstat(fd, &stat) == nil && stat.Mode&syscall.S_IFMT == syscall.S_IFSOCK {
					syscall.Close(fd)
				}
			}
		})
	case "leaves": // a daemon behind, that has a session and a parent of its own
		return hold(func() {
			self, _ := os.Executable()
			parent := exec.Command("sh", "-c", `"$0" &`, self)
			parent.Env = append(os.Environ(), roleEnv+"=daemon")
			parent.Stdout = os.Stdout
			if err := parent.Run(); err != nil {
				fmt.Println(err)
			}
		})
	case "daemon":
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT)
		if _, err := syscall.Setsid(); err != nil {
			fmt.Println(err)
		}
		file, err := os.OpenFile(filepath.Join(os.Getenv("WITNESS_TEST_DIR"), "daemon"), os.O_CREATE|os.O_RDWR, 0o600)
		if err == nil {
			err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX)
		}
		fmt.Println("left", err)
		time.Sleep(time.Hour)
		runtime.KeepAlive(file)
	case "writes": // something that takes a while, from a pool of its own
		return hold(func() {
			pool, err := pgxpool.New(context.Background(), os.Getenv("WITNESS_TEST_STORE"))
			if err == nil {
				go pool.Exec(context.Background(), `INSERT INTO late SELECT 1 FROM pg_sleep(2)`)
			}
		})
	case "session":
		return session()
	case "panics":
		return hold(func() { go panic("in another goroutine") })
	case "exits":
		return hold(func() { os.Exit(3) })
	}
	fmt.Fprintln(os.Stderr, "no such role:", role)
	return 98
}

// session claims 100 keys, in a session of its own.
func session() int {
	ctx := context.Background()
	store, err := openTestStore(ctx)
	if err != nil {
		fmt.Println("ERROR", err)
		return 1
	}
	s, err := claims.NewSession(store, claims.SessionConfig{TTL: 5 * time.Minute, PollInterval: 5 * time.Minute, Logger: testkit.Quiet})
	if err != nil {
		fmt.Println("ERROR", err)
		return 1
	}
	keys, err := claims.NewKeys(s, "tenant")
	if err != nil {
		fmt.Println("ERROR", err)
		return 1
	}
	go s.Run(ctx)
	var ids []string
	for i := range 100 {
		ids = append(ids, fmt.Sprint(i))
	}
	for claimed := 0; claimed < len(ids); {
		got, err := keys.Claim(ctx, ids...)
		if err != nil {
			fmt.Println("ERROR", err)
			return 1
		}
		claimed += len(got)
	}
	fmt.Println("began", "session", os.Getpid(), time.Now().UnixNano(), true)
	select {}
}

var ballast []byte

// hold competes for a lease until it is told to end. Each job takes a lock that the kernel frees when the process is dead:
// if it is not free, two jobs overlap.
func hold(then ...func()) int {
	debug.SetGCPercent(1000)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	mib, _ := strconv.Atoi(os.Getenv("WITNESS_TEST_MIB"))
	ballast = make([]byte, mib<<20)
	for i := 0; i < len(ballast); i += 4096 {
		ballast[i] = 1
	}
	store, err := openTestStore(ctx)
	if err != nil {
		fmt.Println("ERROR", err)
		return 1
	}
	ttl, _ := time.ParseDuration(os.Getenv("WITNESS_TEST_TTL"))
	key := tenure.Key{Type: "lease", ID: "0"}
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key, Holder: fmt.Sprint(os.Getpid()), TTL: ttl, Logger: testkit.Quiet})
	if err != nil {
		fmt.Println("ERROR", err)
		return 1
	}
	c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{RenewInterval: lease.Config().TTL / 30, Reconcile: func(ctx context.Context) error {
		lock, err := os.OpenFile(filepath.Join(os.Getenv("WITNESS_TEST_DIR"), key.ID), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		defer lock.Close()
		what := "began"
		if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
			what = "OVERLAPS"
		}
		term := tenure.TermFromContext(ctx)
		fmt.Println(what, key.ID, os.Getpid(), time.Now().UnixNano(), term.Witnessed())
		for _, do := range then {
			do()
		}
		<-ctx.Done()
		return nil
	}})
	if err != nil {
		fmt.Println("ERROR", err)
		return 1
	}
	_ = c.Run(ctx)
	return 0
}
