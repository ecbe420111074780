package witnessed

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func socketPair(t *testing.T) (here, there int, inode uint64) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	var stat syscall.Stat_t
	require.NoError(t, syscall.Fstat(fds[1], &stat))
	return fds[0], fds[1], stat.Ino
}

// An environment may be copied to a process elsewhere, and a descriptor may have been closed and used for another file.
func TestAProcessWhoseDeathTheWitnessCouldNotProveDoesNotNameIt(t *testing.T) {
	here, there, inode := socketPair(t)
	defer syscall.Close(here)
	defer syscall.Close(there)
	for value, why := range map[string]string{
		"":                                      "",
		"off":                                   "",
		"/a/socket":                             "not the first of its container",
		fmt.Sprintf("name:%d:%d", there, inode): "not one of its descendants", // this process has made the socket itself
		fmt.Sprintf("name:%d:%d", there, inode+1): "was closed",
		"name:9999:1": "was closed",
		"name:0:1":    "was closed",
	} {
		t.Setenv(Env, value)
		socket, name, _, err := attach()
		require.Nil(t, socket, value)
		require.Empty(t, name, value)
		if why == "" {
			require.NoError(t, err, value)
		} else {
			require.ErrorContains(t, err, why, value)
		}
		_, isSet := syscall.Getenv(Env)
		require.False(t, isSet, "what this process starts is not witnessed in its own right")
	}
}

// inheritedBy attaches a process to a socket, once.
func inheritedBy(fd int) attacher {
	return func() (socket, string, attacher, error) {
		s, name, err := open(fd, "name")
		return s, name, nil, err
	}
}

var web = Line{Key: [2]string{"lease", "web"}}

func TestARecordNamesAWitnessOnlyIfThatHasBeenToldOfIt(t *testing.T) {
	here, there, _ := socketPair(t)
	l := &link{attach: inheritedBy(there)}
	line := make([]byte, 1000)
	read := func() string {
		n, err := syscall.Read(here, line)
		require.NoError(t, err)
		return string(line[:n])
	}
	l.tell(Line{Wake: [2]string{"tenure.claims", "kind tenant"}})
	name, err := l.tell(web)
	require.NoError(t, err)
	require.Equal(t, "name", name)
	l.tell(Line{Answered: web.Key})
	require.Equal(t, []string{`{"wake":["tenure.claims","kind tenant"]}`, `{"key":["lease","web"]}`, `{"answered":["lease","web"]}`}, []string{read(), read(), read()})
	for told := 0; name != ""; told++ { // nobody reads
		require.Less(t, told, 10000)
		name, err = l.tell(web)
		require.NoError(t, err)
	}
	for range 5 {
		read()
	}
	name, err = l.tell(web)
	require.NoError(t, err)
	require.Equal(t, "name", name)
	require.NoError(t, syscall.Close(here)) // it is dead
	l.tell(Line{Answered: web.Key})         // whose caller reports no error
	name, err = l.tell(web)
	require.Error(t, err)
	require.Empty(t, name)
	name, err = l.tell(web)
	require.NoError(t, err, "it was said once")
	require.Empty(t, name)
}

func TestAStoppedWitnessHoldsUpOneAcquireInEachInterval(t *testing.T) {
	here, there, _ := socketPair(t)
	defer syscall.Close(here)
	l := &link{attach: inheritedBy(there)}
	began, told := time.Now(), 0
	for i := range 1000 {
		name, err := l.tell(Line{Key: [2]string{"lease", fmt.Sprint(i)}})
		require.NoError(t, err)
		if name != "" {
			told++
		}
	}
	require.Less(t, told, 800, "the socket must be full, or this proves nothing")
	require.Less(t, time.Since(began), 2*time.Second, "each waited")
}

// A sidecar begins later than the program, and is restarted.
func TestASidecarThatListensLaterIsToldAtTheNextAcquire(t *testing.T) {
	path := filepath.Join(t.TempDir(), "witness.sock")
	l := &link{attach: sidecar(path, time.Second)}
	tell := func() (name string, err error) {
		l.next = time.Time{}.Add(1) // the pause is over
		return l.tell(web)
	}
	l.tell(Line{Wake: [2]string{"tenure.claims", "kind tenant"}})
	name, err := l.tell(web)
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Empty(t, name)
	name, err = tell()
	require.NoError(t, err, "it was said once")
	require.Empty(t, name)
	for _, want := range []string{"first", "second"} {
		listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		require.NoError(t, err)
		accepted := make(chan *net.UnixConn, 1)
		go func() {
			conn, err := listener.AcceptUnix()
			if err == nil {
				_, err = conn.Write([]byte(want))
			}
			if err != nil {
				t.Error(err)
			}
			accepted <- conn
		}()
		name, err = tell()
		require.NoError(t, err)
		require.Equal(t, want, name)
		conn, line := <-accepted, make([]byte, 1000)
		for _, want := range []string{`{"wake":["tenure.claims","kind tenant"]}`, `{"key":["lease","web"]}`} {
			n, err := conn.Read(line)
			require.NoError(t, err)
			require.Equal(t, want, string(line[:n]))
		}
		require.NoError(t, conn.Close())
		require.NoError(t, listener.Close())
		name, err = tell()
		require.Error(t, err, "it is gone")
		require.Empty(t, name)
	}
}
