package storeurl

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAURLIsOfPostgresOrAPath(t *testing.T) {
	for url, want := range map[string]string{
		"postgres://u:p@h/db": "", "postgresql://h/db": "", "data.db": "data.db", "./a:b.db": "./a:b.db", "/var/lib/data.db": "/var/lib/data.db",
		"sqlite:data.db": "data.db", "sqlite:/data.db": "/data.db", "sqlite:///data.db": "/data.db",
		"sqlite:/odd/host:5432": "/odd/host:5432", "//var/lib/data.db": "//var/lib/data.db",
		"/var/lib//data.db": "/var/lib//data.db", "sqlite:./dir//data.db": "./dir//data.db", "/env=prod/data.db": "/env=prod/data.db",
		"/a?b=c;d&e@f.db": "/a?b=c;d&e@f.db", "sqlite:/a?b=c": "/a?b=c", "./a?b=c;d&e@f.db": "./a?b=c;d&e@f.db", "../a=b": "../a=b", "a;b&c d%.db": "a;b&c d%.db",
	} {
		got, shared, err := Path(url)
		require.NoError(t, err, url)
		require.False(t, shared, url)
		require.Equal(t, want, got, url)
	}
}

func TestAFileIsSharedIfItsURLSaysSo(t *testing.T) {
	for url, want := range map[string]bool{
		"data.db?shared=true": true, "sqlite:data.db?shared=true": true, "sqlite:/var/lib/data.db?shared=true": true,
		"data.db?shared=false": false, "data.db": false,
	} {
		_, shared, err := Path(url)
		require.NoError(t, err, url)
		require.Equal(t, want, shared, url)
	}
	path, _, err := Path("sqlite:///var/lib/data.db?shared=true")
	require.NoError(t, err)
	require.Equal(t, "/var/lib/data.db", path)
}

func TestWhatIsNoPathIsRefusedAndNotQuoted(t *testing.T) {
	for _, url := range []string{
		"", "sqlite:", "sqlite://sEcrEt.db", "mysql://u:sEcrEt@h/db", "postgres:/u:sEcrEt@h/db", "Postgres://u:sEcrEt@h/db", "host=db password=sEcrEt",
		"u:sEcrEt@h/db", "localhost:5432", "localhost:5432/db", "dbname=x", "http://sEcrEt",
		":memory:", "sqlite::memory:", "sqlite:postgres://u:sEcrEt@h/db", "u:sEc/sEcrEt@h/db", "u:sEcrEt/x@tcp(db)/x",
		"postgres//u:sEcrEt@h/db", "postgres.//u:sEcrEt@h/db", "h/db?user=u&pass=sEcrEt", "nats//h:4222", "nats//h", "nats:/h:4222", "sEcrEt@h", "sqlite:u:sEcrEt@h/db", "a:b.db", "sqlite:dir//data.db",
		"/data.db?shared", "/data.db?shared=", "/data.db?shared=1", "/data.db?shared=sEcrEt", "/data.db?shared=true&x=sEcrEt", "?shared=true", "h/db?user=sEcrEt?shared=true",
	} {
		path, _, err := Path(url)
		if err == nil || path != "" || strings.Contains(err.Error(), "sEcrEt") {
			t.Errorf("%q: got %q, %v", url, path, err)
		}
	}
	_, _, err := Path(":memory:")
	require.ErrorContains(t, err, "OpenSQLite opens one")
}
