package kit

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// OnlyPublicImports checks that the module of the calling test imports only public packages of the
// root module, and this package only in its tests. A program may choose a newer version of the root
// module than the one that the calling module was tested with, and only public packages keep their
// promises from one version to the next.
func OnlyPublicImports(t *testing.T) {
	t.Helper()
	const root = "github.com/tenurelib/tenure"
	imports := func(field string) []string {
		out, err := exec.Command("go", "list", "-f", `{{join `+field+` "\n"}}`, "./...").Output()
		require.NoError(t, err)
		return strings.Fields(string(out))
	}
	product := imports(".Imports")
	require.Contains(t, product, root)
	for _, path := range append(product, append(imports(".TestImports"), imports(".XTestImports")...)...) {
		if strings.HasPrefix(path, root) {
			require.NotContains(t, path+"/", "/internal/")
		}
	}
	for _, path := range product {
		require.NotContains(t, path, root+"/proof/")
	}
}
